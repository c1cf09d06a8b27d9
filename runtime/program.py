"""What one rank executes for one traced graph: prelude, segments, and what crosses between stages.

A plan fixes the strategies on one graph; the same strategies serve another batch size, sequence length or the
evaluation graph as long as the structure is the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from autoplan.errors import InputError, PlanError
from autoplan.ir import Graph, OpNode, SegmentedGraph, refs_in
from autoplan.plan.place import Placed, PlacedOp, PlacedValue, place, replicated
from autoplan.plan.plan import Plan, Recompute, Stage
from autoplan.runtime.collectives import AxisGroup
from autoplan.runtime.local_ops import denominator_operands, loss_denominator
from autoplan.runtime.mesh import RankMesh
from autoplan.runtime.rewrite import DENOMINATOR, Axes, local_module

ALONE = AxisGroup(group=None, size=1, coordinate=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSegment:
    """One segment of this stage: its module and the names of what it takes (in order) and gives."""

    module: fx.GraphModule
    arrivals: tuple[str, ...]
    params: tuple[str, ...]
    """Names in ``state_dict``; they follow the arrivals."""
    denominators: tuple[str, ...]
    departures: tuple[str, ...]
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """All that one stage runs. Values are named as in the graph."""

    graph: Graph
    prelude: LocalSegment
    segments: tuple[LocalSegment, ...]
    received: tuple[PlacedValue, ...]
    """What arrives from the stage before, in order."""
    sent: tuple[PlacedValue, ...]
    outputs: Mapping[str, PlacedValue]
    """How each tensor that the model returns stands once it is made."""
    counted: Mapping[str, tuple[LocalSegment, OpNode]]
    """Per loss node of this stage: how its targets follow from inputs and constants at the global batch."""
    parts: int

    def denominators(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The global count that each loss divides by; ``values`` are the inputs and constants of the step."""
        return {
            DENOMINATOR + name: loss_denominator(node, *labels.module(0, *(values[a] for a in labels.arrivals)))
            for name, (labels, node) in self.counted.items()
        }


def build_program(plan: Plan, segmented: SegmentedGraph, ranks: RankMesh, *, training: bool) -> Program:
    """Write the local modules of this rank's stage. Raises PlanError when the graph does not have the plan's structure.

    In evaluation everything the model returns travels to the last stage; in training only the loss does.
    """
    graph = segmented.graph
    placed = place(plan, segmented)
    axes = Axes(parts=plan.parts, tensor=ranks.tp, device=ranks.device)
    stage = plan.stages[ranks.pp.coordinate]
    wanted = set(refs_in(graph.outputs)) if not training else set()
    if graph.loss is not None:
        wanted.add(graph.loss)
    for name in sorted(name for name in wanted if name.startswith("param:")):
        raise InputError(
            f"the model returns its parameter {name.removeprefix('param:')}, which lies in parts on its ranks: take it "
            "from state_dict() of the compiled model instead"
        )
    last = ranks.pp.coordinate == ranks.pp.size - 1
    cuts = [_crossing(segmented, at.start, wanted) for at in plan.stages] + [()]
    return Program(
        graph=graph,
        prelude=_prelude(segmented, placed, stage, wanted if last else set(), axes),
        segments=tuple(_segments(plan, segmented, placed, stage, wanted, axes)),
        received=tuple(placed.values[n] for n in cuts[ranks.pp.coordinate]),
        sent=tuple(placed.values[n] for n in cuts[ranks.pp.coordinate + 1]),
        outputs={n: placed.values[n] for n in wanted},
        counted=_counted(segmented, placed, stage, ranks.device),
        parts=plan.parts,
    )


def _crossing(segmented: SegmentedGraph, start: int, wanted: set[str]) -> tuple[str, ...]:
    """Values made by segments before ``start`` that later ones read or the caller wants, in order of making."""
    if start == 0:
        return ()
    read = {name for s in segmented.segments[start:] for name in s.inputs} | wanted
    return tuple(name for s in segmented.segments[:start] for name in s.outputs if name in read)


def _segments(
    plan: Plan, segmented: SegmentedGraph, placed: Placed, stage: Stage, wanted: set[str], axes: Axes
) -> Iterator[LocalSegment]:
    written: dict[tuple[object, ...], fx.GraphModule] = {}
    last_read = {name: i for i, segment in enumerate(segmented.segments) for name in segment.inputs}
    for position in range(stage.start, stage.end):
        segment, layout = segmented.segments[position], plan.layout(stage.layouts[position - stage.start])
        leaving = [
            (name, placed.values[name].tensor)
            for name in segment.outputs
            if name in wanted or last_read.get(name, -1) > position
        ]
        arrivals = [placed.values[name] for name in (*segment.inputs, *segment.params)]
        key = (
            layout.name,
            tuple((a.meta, a.batch, a.tensor) for a in arrivals),
            tuple(segment.outputs.index(name) for name, _ in leaving),
        )
        ops = [placed.ops[name] for name in segment.nodes]
        if key not in written:
            written[key] = local_module(ops, arrivals, leaving, axes)
        yield LocalSegment(
            module=written[key],
            arrivals=segment.inputs,
            params=tuple(name.removeprefix("param:") for name in segment.params),
            denominators=tuple(DENOMINATOR + op.node.name for op in ops if op.needs_denominator),
            departures=tuple(name for name, _ in leaving),
            recompute=layout.recompute,
        )


def _prelude(segmented: SegmentedGraph, placed: Placed, stage: Stage, wanted: set[str], axes: Axes) -> LocalSegment:
    """The prelude ops that this stage's segments (and the caller) read, as one module."""
    read = {name for s in segmented.segments[stage.start : stage.end] for name in s.inputs} | wanted
    prelude = {result for name in segmented.prelude for result in placed.ops[name].node.results}
    return _closure(segmented, placed.ops, placed, sorted(read & prelude), axes)


def _closure(
    segmented: SegmentedGraph, ops: Mapping[str, PlacedOp], placed: Placed, targets: Sequence[str], axes: Axes
) -> LocalSegment:
    """A module that makes ``targets`` from inputs and constants alone."""
    graph = segmented.graph
    needed = set(targets)
    chosen = []
    for name in reversed(segmented.prelude):
        op = ops[name]
        if needed & set(op.node.results):
            needed |= set(op.node.operands)
            chosen.append(op)
    sources = [*(i.value for i in graph.inputs), *(name for name, _ in graph.constants)]
    arrivals = tuple(name for name in sources if name in needed)
    module = local_module(
        chosen[::-1], [placed.values[a] for a in arrivals], [(t, None) for t in targets], axes
    )  # fmt: skip
    return LocalSegment(
        module=module, arrivals=arrivals, params=(), denominators=(), departures=tuple(targets), recompute="none"
    )


def _counted(
    segmented: SegmentedGraph, placed: Placed, stage: Stage, device: torch.device
) -> dict[str, tuple[LocalSegment, OpNode]]:
    """For each loss of the stage that divides by a global count: the module that makes its targets, whole."""
    whole = {
        name: PlacedOp(
            node=placed.ops[name].node, batch=replicated(placed.ops[name].node), tensor=placed.ops[name].tensor
        )
        for name in segmented.prelude
    }
    found = {}
    for segment in segmented.segments[stage.start : stage.end]:
        for op in (placed.ops[name] for name in segment.nodes):
            if op.needs_denominator:
                axes = Axes(parts=1, tensor=ALONE, device=device)
                labels = denominator_operands(op.node)
                _check_free_of_params(segmented, op.node, labels)
                found[op.node.name] = (_closure(segmented, whole, placed, labels, axes), op.node)
    return found


def _check_free_of_params(segmented: SegmentedGraph, node: OpNode, labels: Sequence[str]) -> None:
    """Raise PlanError when a loss's labels are computed from parameters: they cannot be counted ahead of the step."""
    prelude = set(segmented.prelude)
    for name in labels:
        made = segmented.graph.node_of.get(name)
        if name.startswith("param:") or (made is not None and made.name not in prelude):
            raise PlanError(
                f"the labels of {node.where} are computed from parameters, so their number is not known before the "
                "step: such a loss runs with dp=1 and one microbatch only"
            )
