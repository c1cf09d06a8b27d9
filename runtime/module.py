"""ParallelModule: the object the training loop holds.

Calling it in training mode runs the whole step, forward and backward, over all microbatches and stages. The loss that
comes back is the same on every rank; ``loss.backward()`` hands over the gradients that the step computed, times the
incoming gradient. So the loop around it stays the one for a single device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoplan.errors import InputError, PlanError
from autoplan.ir import Graph, Ref, SegmentedGraph
from autoplan.plan.plan import Plan
from autoplan.plan.verify import verify_param_shapes
from autoplan.randomness import random_ops
from autoplan.runtime.data import StageModule
from autoplan.runtime.gather import gather_output
from autoplan.runtime.handover import Gradient, NotGathered, with_gradients
from autoplan.runtime.initialize import init_weights
from autoplan.runtime.mesh import build_mesh
from autoplan.runtime.pipeline import TrainingSteps, evaluate
from autoplan.runtime.program import Program, build_program
from autoplan.runtime.skeleton import aliases, on_meta, persistent_buffers, signature
from autoplan.runtime.state import LoadReport, load_state
from autoplan.runtime.tied import TiedParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A model traced for one way of calling it.

    ``flatten`` turns the call's arguments into tensors in the order of ``graph.inputs``; ``unflatten`` rebuilds what
    the model returns from one object per graph output. ``constants`` holds traced constants by value name.
    """

    segmented: SegmentedGraph
    constants: Mapping[str, Tensor]
    flatten: Callable[[tuple[object, ...], Mapping[str, object]], Sequence[Tensor]]
    unflatten: Callable[[Sequence[object]], object]


Tracer = Callable[[nn.Module, tuple[object, ...], Mapping[str, object]], TracedCall]
"""Traces a module in its current mode for these arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A traced call with what this rank runs for it; ``steps`` is None for a pass without gradients."""

    call: TracedCall
    program: Program
    steps: TrainingSteps | None


class ParallelModule(nn.Module):
    """A model that runs by a plan. Names are the user's; parameters are DTensors of this rank's stage."""

    def __init__(self, model: nn.Module, plan: Plan, tracer: Tracer) -> None:
        """``model`` is left as it is, its values are copied. Raises PlanError when plan, ranks and model disagree."""
        super().__init__()
        self.plan = plan
        self._tracer = tracer
        whole = dict(model.named_parameters())
        _check_names(plan, whole)
        verify_param_shapes(plan, {name: tuple(p.shape) for name, p in whole.items()})
        self._ranks = build_mesh(plan)
        at = plan.stages[self._ranks.pp.coordinate]
        placements = {p.name: p for p in plan.params}
        read = {name for names in plan.segment_params for name in names}
        unused = [name for name in whole if name not in read] if self._ranks.pp.coordinate == 0 else []
        stage = StageModule(
            plan.segment_params[at.start : at.end], placements, lambda name: whole[name], self._ranks, unused
        )
        # In a tuple, so that neither is a child: parameters show under the user's names only, and once.
        self._held = (stage, on_meta(model))
        self._tied = TiedParams(plan, self._ranks)
        self._has_values = not any(p.is_meta for p in whole.values())
        self._prepared: dict[tuple[object, ...], _Prepared] = {}
        stage.mark_shares(self._tied.counted_elsewhere)
        self.training = model.training  # not train(): parts of the model may be in eval() on their own

    @property
    def _stage(self) -> StageModule:
        return self._held[0]

    @property
    def _skeleton(self) -> nn.Module:
        return self._held[1]

    # Names and state

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the user's names; a tied one once."""
        for name in self._stage.names:
            yield (f"{prefix}.{name}" if prefix else name), self._stage.param(name)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers, whole on each rank."""
        yield from self._skeleton.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Parameters (DTensors, every name of a tied one) and persistent buffers of this rank."""
        others = aliases(self._skeleton)
        state: dict[str, Any] = {}
        for name in self._stage.names:
            for key in (name, *others.get(name, ())):
                state[key] = self._stage.param(name).detach()
        return state | persistent_buffers(self._skeleton)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadReport:
        """Fill parameters from whole tensors (or DTensors) by name; entries of other stages are skipped.

        Raises InputError naming missing and unexpected keys (``strict``) or a shape that differs.
        """
        if assign:
            raise InputError("assign=True is not supported: parameters keep their place, values are copied")
        report = load_state(self._stage, self._skeleton, state_dict, strict=strict)
        self._has_values = True
        return report

    def init_weights(self, seed: int = 0) -> None:
        """Fill every parameter as the user's modules initialise themselves; the same under every plan.

        Raises InputError naming the module that leaves a parameter unset.
        """
        init_weights(self._stage, self._skeleton, seed)
        self._has_values = True

    def _apply(self, fn: Any, recurse: bool = True) -> "ParallelModule":
        raise InputError(
            "a compiled model cannot be moved or cast (.to, .cuda, .double, ...): do it before autoplan.compile"
        )

    def train(self, mode: bool = True) -> "ParallelModule":
        """Switch between training and evaluation."""
        self.training = mode
        self._skeleton.train(mode)
        return self

    # Running

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run a step (in training mode with gradients on) or a forward pass, on the global batch, on every rank.

        A step returns what the model returns, with the loss in its place and ``NotGathered`` for other tensors.
        Raises InputError when the arguments are not what the model was traced with, or the batch does not divide.
        """
        if not self._has_values:
            raise InputError(
                "the parameters have no values yet: call model.init_weights(seed) or model.load_state_dict(state) first"
            )
        prepared = self._prepare(args, kwargs)
        values = self._step_values(prepared, args, kwargs)
        if prepared.steps is not None:
            return self._train(prepared, prepared.steps, values)
        return self._evaluate(prepared, values)

    def _prepare(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> _Prepared:
        learning = self.training and torch.is_grad_enabled()
        modes = tuple(module.training for module in self._skeleton.modules())
        key = (modes, learning, signature(args, kwargs))
        if key not in self._prepared:
            call = self._tracer(self._skeleton, args, kwargs)
            if learning:
                _check_trainable(call.segmented.graph)
            program = build_program(self.plan, call.segmented, self._ranks, training=learning)
            count = self.plan.num_microbatches
            steps = TrainingSteps(program, self._stage, self._ranks, count) if learning else None
            self._prepared[key] = _Prepared(call=call, program=program, steps=steps)
        return self._prepared[key]

    def _step_values(
        self, prepared: _Prepared, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> dict[str, Tensor]:
        graph, device = prepared.program.graph, self._ranks.device
        leaves = prepared.call.flatten(args, kwargs)
        values = {i.value: leaf.to(device) for i, leaf in zip(graph.inputs, leaves, strict=True)}
        if any(value.requires_grad for value in values.values()):
            raise InputError("inputs that require gradients are not supported: detach() them")
        known = {f"buffer:{name}": b for name, b in self._skeleton.named_buffers(remove_duplicate=False)}
        known |= prepared.call.constants
        values |= {name: known[name].to(device) for name, _ in graph.constants}
        return values | prepared.program.denominators(values)

    def _train(self, prepared: _Prepared, steps: TrainingSteps, values: Mapping[str, Tensor]) -> object:
        params = [self._stage.param(name) for name in self._stage.names]
        kept = [p.grad for p in params]
        for p in params:
            p.grad = None  # FSDP2 writes here; what the user has accumulated comes back below
        loss = steps.run(values)
        grads = self._tied.sum(self._stage.take_gradients(), self._stage)
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad
        self._share_loss(loss)
        loss = with_gradients(loss, params, [self._gradient(name, grads.get(name)) for name in self._stage.names])
        graph = prepared.program.graph

        def output(index: int) -> object:
            out = graph.outputs[index]
            if not isinstance(out, Ref):
                return out
            return loss if out.name == graph.loss else NotGathered(f"output {index} of the model")

        return prepared.call.unflatten([output(i) for i in range(len(graph.outputs))])

    def _gradient(self, name: str, local: Tensor | None) -> Gradient | None:
        if local is None:
            return None
        return partial(self._scaled_gradient, name, local)

    def _scaled_gradient(self, name: str, local: Tensor, grad: Tensor) -> Tensor:
        return self._stage.gradient(name, local.mul_(grad.to(local.dtype)))  # handed over once, so in place

    def _share_loss(self, loss: Tensor) -> None:
        """Sum the loss over the data axis on the last stage, then give it to the other stages, in place."""
        pp, dp = self._ranks.pp, self._ranks.dp
        if dp.size > 1 and pp.coordinate == pp.size - 1:
            dist.all_reduce(loss, group=dp.group)
        if pp.size > 1:
            dist.broadcast(loss, group=pp.group, group_src=pp.size - 1)

    def _evaluate(self, prepared: _Prepared, values: Mapping[str, Tensor]) -> object:
        program = prepared.program
        results = evaluate(program, self._stage, self._ranks, self.plan.num_microbatches, values)
        with torch.no_grad():
            whole = {
                name: gather_output(value, program.parts, [r[name] for r in results], self._ranks)
                for name, value in sorted(program.outputs.items())
            }
        outputs = program.graph.outputs
        return prepared.call.unflatten([whole[o.name] if isinstance(o, Ref) else o for o in outputs])


def _check_names(plan: Plan, whole: Mapping[str, nn.Parameter]) -> None:
    planned = {p.name for p in plan.params}
    unknown, unplanned = sorted(planned - set(whole)), sorted(set(whole) - planned)
    if unknown or unplanned:
        raise PlanError(
            f"the plan was made for {plan.model!r} and does not fit this model: the model has no "
            f"{unknown[:3] or 'nothing'}, the plan has no {unplanned[:3] or 'nothing'}: search again for this model"
        )
    dtype = "/".join(sorted({str(p.dtype).removeprefix("torch.") for p in whole.values()}))
    if dtype != plan.dtype:
        raise PlanError(
            f"the plan was made for parameters in {plan.dtype}, this model has {dtype}, so time and memory would not "
            f"be as planned: convert the model first (model.to(torch.{plan.dtype})), or search again for {dtype}"
        )
    frozen = sorted(name for name, p in whole.items() if not p.requires_grad)
    if frozen:
        raise InputError(f"frozen parameters are not supported yet: {frozen[:3]} do not require gradients")


def _check_trainable(graph: Graph) -> None:
    """Raise InputError for what a training step cannot do yet."""
    if graph.loss is None:
        raise InputError(
            "a training step needs the loss, but the model returned no scalar of shape () that depends on its "
            "parameters (or several, none of them named loss): compute the loss inside the model and pass the targets, "
            "or call it in eval() mode"
        )
    for node, rate in random_ops(graph):
        raise InputError(
            f"{node.where} drops out with p={rate:g}: training with dropout is not supported yet, since its random "
            "numbers would depend on the plan. Set dropout to 0 in the model's configuration"
        )
