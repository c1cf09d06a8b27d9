"""One step of one stage: microbatches in 1F1B order over ``torch.distributed.pipelining``, or a plain loop alone."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from autoplan.plan.place import PlacedValue
from autoplan.runtime.collectives import AxisGroup
from autoplan.runtime.data import StageModule, views_allowed
from autoplan.runtime.mesh import RankMesh
from autoplan.runtime.program import LocalSegment, Program
from autoplan.runtime.remat import run_segment
from autoplan.sharding import local_shape

Values = dict[str, Tensor]


def run_stage(
    program: Program, stage: StageModule, step: Mapping[str, Tensor], part: int, received: Sequence[Tensor]
) -> Values:
    """Run one microbatch through the segments of this stage.

    ``step`` holds inputs, constants and denominators of the step. Returns every value that leaves a segment,
    with what was received and what the prelude made.
    """
    values = dict(step)
    with torch.no_grad():
        prelude = program.prelude
        made = prelude.module(part, *(values[name] for name in prelude.arrivals))
    values |= dict(zip(prelude.departures, made, strict=True))

    def run(*arrived: Tensor) -> tuple[Tensor, ...]:
        values.update({v.name: x for v, x in zip(program.received, arrived, strict=True)})
        for segment, module in zip(program.segments, stage.segments, strict=True):
            arrivals = [values[name] for name in segment.arrivals]
            outputs = module(partial(_run_segment, segment, stage, values, part), *arrivals)
            values.update(zip(segment.departures, outputs, strict=True))
        return tuple(values[name] for segment in program.segments for name in segment.departures)

    with views_allowed():
        stage(run, *received)
    return values


def _run_segment(
    segment: LocalSegment, stage: StageModule, values: Mapping[str, Tensor], part: int, *arrivals: Tensor
) -> tuple[Tensor, ...]:
    params = [stage.local(name) for name in segment.params]
    denominators = [values[name] for name in segment.denominators]
    return run_segment(segment.module, segment.recompute, part, *arrivals, *params, *denominators)


class _Microbatch(nn.Module):
    """What the pipelining library calls: activations in, activations (or the loss) out."""

    def __init__(self, program: Program, stage: StageModule, first_part: int) -> None:
        super().__init__()
        self._program = program
        self._stage = (stage,)  # in a tuple: the library must not find (and handle) the FSDP modules inside
        self._first_part = first_part
        self.step: Mapping[str, Tensor] = {}

    def forward(self, *received: Tensor, microbatch: Tensor) -> tuple[Tensor, ...] | Tensor:
        program = self._program
        part = self._first_part + int(microbatch)
        values = run_stage(program, self._stage[0], self.step, part, received)
        if program.sent:
            return tuple(values[v.name] for v in program.sent)
        assert program.graph.loss is not None
        return values[program.graph.loss]


class _Stage(PipelineStage):
    """A stage that tells its parameters which backward is the last of the step."""

    def __init__(self, params: StageModule, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._params = params

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._params.set_last_microbatch(last_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)


class TrainingSteps:
    """Runs training steps of one program; keeps the schedule, whose buffers have the program's shapes."""

    def __init__(self, program: Program, stage: StageModule, ranks: RankMesh, num_microbatches: int) -> None:
        """Nothing is sent until the first step."""
        self._program, self._stage, self._ranks, self._count = program, stage, ranks, num_microbatches
        self._first_part = ranks.dp.coordinate * num_microbatches
        self._module = _Microbatch(program, stage, self._first_part)
        self._schedule = self._build_schedule() if ranks.pp.size > 1 else None

    def _build_schedule(self) -> Schedule1F1B:
        pp, program = self._ranks.pp, self._program
        made = partial(_example, parts=program.parts, tensor=self._ranks.tp, device=self._ranks.device)
        last = pp.coordinate == pp.size - 1
        loss = program.outputs[program.graph.loss or ""]
        stage = _Stage(
            self._stage, self._module, pp.coordinate, pp.size, self._ranks.device,
            input_args=tuple(made(v) for v in program.received),
            output_args=tuple(made(v) for v in (program.sent if not last else [loss])),
            group=pp.group,
        )  # fmt: skip
        # The loss comes out of the model, so the library's loss function has nothing left to do. Gradients are not
        # scaled: each microbatch's loss already carries its share of the global mean.
        return Schedule1F1B(stage, self._count, loss_fn=lambda output, _target: output, scale_grads=False)

    def run(self, step: Mapping[str, Tensor]) -> Tensor:
        """Forward and backward of all microbatches; gradients stay in the stage. Returns the sum of this rank's losses.

        The loss is zero on stages but the last.
        """
        losses = self._run_alone(step) if self._schedule is None else self._run_schedule(self._schedule, step)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._no_loss()

    def _no_loss(self) -> Tensor:
        loss = self._program.outputs[self._program.graph.loss or ""]
        return torch.zeros_like(
            _example(loss, self._program.parts, self._ranks.tp, self._ranks.device), requires_grad=False
        )

    def _run_alone(self, step: Mapping[str, Tensor]) -> list[Tensor]:
        self._module.step = step
        losses = []
        for i in range(self._count):
            self._stage.set_last_microbatch(i == self._count - 1)
            loss = self._module(microbatch=torch.tensor([i]))
            loss.backward()
            losses.append(loss.detach())
        return losses

    def _run_schedule(self, schedule: Schedule1F1B, step: Mapping[str, Tensor]) -> list[Tensor]:
        self._module.step = step
        order = torch.arange(self._count, device=self._ranks.device)
        losses: list[Tensor] = []
        last = self._ranks.pp.coordinate == self._ranks.pp.size - 1
        target = order if last else None  # the library asks for one wherever there is a loss
        schedule.step(target=target, losses=losses if last else None, return_outputs=False, microbatch=order)
        return losses


def evaluate(
    program: Program, stage: StageModule, ranks: RankMesh, num_microbatches: int, step: Mapping[str, Tensor]
) -> list[Values]:
    """Forward of all microbatches without gradients; their values on the last stage, an empty list elsewhere."""
    pp = ranks.pp
    results = []
    first_part = ranks.dp.coordinate * num_microbatches
    with torch.no_grad():
        for i in range(num_microbatches):
            received = []
            for value in program.received:
                buffer = _example(value, program.parts, ranks.tp, ranks.device).detach()
                dist.recv(buffer, group=pp.group, group_src=pp.coordinate - 1)
                received.append(buffer)
            values = run_stage(program, stage, step, first_part + i, received)
            for value in program.sent:
                dist.send(values[value.name].contiguous(), group=pp.group, group_dst=pp.coordinate + 1)
            if pp.coordinate == pp.size - 1:
                results.append(values)
    return results


def _example(value: PlacedValue, parts: int, tensor: AxisGroup, device: torch.device) -> Tensor:
    """An empty tensor of the shape that the value has on this rank."""
    shape = local_shape(value.meta.shape, value.batch, parts, 0)
    shape = local_shape(shape, value.tensor, tensor.size, tensor.coordinate)
    return torch.empty(shape, dtype=getattr(torch, value.meta.dtype), device=device, requires_grad=True)
