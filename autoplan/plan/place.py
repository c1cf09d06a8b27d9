"""A plan laid over a graph: every op with its strategies, every value with its placements.

Plan and SegmentedGraph in, ``Placed`` out. The graph may be another than the one that was planned (another batch size
or sequence length, evaluation, a call without targets) as long as its structure is the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoplan.errors import PlanError
from autoplan.ir import OpNode, SegmentedGraph, TensorMeta
from autoplan.plan.plan import Layout, OpPlacement, Plan
from autoplan.sharding import REPLICATE, Placement, Replicate, Strategy

Found = TypeVar("Found", OpPlacement, Strategy)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOp:
    """A node at the global batch, with its strategies on both axes."""

    node: OpNode
    batch: Strategy
    tensor: Strategy

    @property
    def needs_denominator(self) -> bool:
        """Whether its local form divides by a count over the whole batch."""
        return "cross_entropy_tokens" in (self.batch.local, self.tensor.local)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedValue:
    """A value from outside and how it arrives. ``meta`` is the one at the global batch."""

    name: str
    meta: TensorMeta
    batch: Placement
    tensor: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Ops by node name, values by value name. A value's tensor placement is the one in which others receive it."""

    ops: Mapping[str, PlacedOp]
    values: Mapping[str, PlacedValue]


def check_structure(plan: Plan, segmented: SegmentedGraph) -> None:
    """Raise PlanError unless the graph is the planned one, up to sizes, and its batch divides as planned."""
    check_chain(plan, segmented)
    if segmented.graph.batch_size % plan.parts:
        raise PlanError(
            f"the plan cuts the batch into {plan.parts} equal parts (dp={plan.mesh.size('dp')} x "
            f"{plan.num_microbatches} microbatches), which does not divide a batch of {segmented.graph.batch_size}: "
            f"pass a multiple of {plan.parts}"
        )


def check_chain(plan: Plan, segmented: SegmentedGraph) -> None:
    """Raise PlanError unless the graph is the planned one, up to sizes.

    The plan may divide the graph's classes, as a search does where only some of a class are pinned.
    """
    kinds = tuple(s.kind for s in segmented.segments)
    names = tuple(tuple(v.removeprefix("param:") for v in s.params) for s in segmented.segments)
    if names != plan.segment_params or not _refines(plan.segment_kinds, kinds):
        raise PlanError(
            f"the plan was made for {plan.model!r}, whose chain of segments is not this model's "
            f"({len(plan.segment_kinds)} segments there, {len(kinds)} here): search again for this model"
        )


def _refines(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Whether segments of one kind of the first are of one kind of the second."""
    first: dict[int, int] = {}
    same_length = len(fine) == len(coarse)
    return same_length and all(first.setdefault(a, b) == b for a, b in zip(fine, coarse, strict=True))


def replicated(node: OpNode) -> Strategy:
    """The strategy that runs an op whole on every rank."""
    return Strategy(inputs=(REPLICATE,) * len(node.operands), outputs=(REPLICATE,) * len(node.outputs))


def place(plan: Plan, segmented: SegmentedGraph) -> Placed:
    """Lay the plan over the graph. Raises PlanError unless the graph is the planned one, up to sizes."""
    check_structure(plan, segmented)
    graph = segmented.graph
    by_name = {node.name: node for node in graph.nodes}
    ops: dict[str, PlacedOp] = {}
    prelude = dict(plan.prelude)
    for name in segmented.prelude:
        batch = _same_op(plan, by_name[name], prelude.get(name))
        ops[name] = _placed_op(plan, by_name[name], batch, replicated(by_name[name]))
    leaving: dict[str, Placement] = {}
    for segment, layout in zip(segmented.segments, _layouts(plan), strict=True):
        for name, planned in _match(plan, [by_name[n] for n in segment.nodes], layout):
            ops[name] = _placed_op(plan, by_name[name], planned.batch, planned.tensor)
        if len(segment.outputs) == len(layout.outputs):
            leaving |= dict(zip(segment.outputs, layout.outputs, strict=True))
    whole = [*graph.constants, *((i.value, i.meta) for i in graph.inputs)]
    values = {name: _value(name, meta, REPLICATE, REPLICATE) for name, meta in whole}
    read = {name for names in plan.segment_params for name in names}
    tensor_of = {param.name: param.tensor for param in plan.params}
    for p in graph.params:
        if p.name in read:
            values[p.value] = _value(p.value, p.meta, Replicate(partial_grad=True), tensor_of[p.name])
    for op in ops.values():
        for i, name in enumerate(op.node.results):
            tensor = leaving.get(name, op.tensor.outputs[i])
            values[name] = _value(name, op.node.outputs[i], op.batch.outputs[i], tensor)
    return Placed(ops=ops, values=values)


def _placed_op(plan: Plan, node: OpNode, batch: Strategy, tensor: Strategy) -> PlacedOp:
    """An axis of one splits nothing, whatever the plan would do on a longer one."""
    for strategy in (batch, tensor):
        arity = len(strategy.inputs), len(strategy.outputs)
        if arity != (len(node.operands), len(node.results)):
            raise PlanError(
                f"{node.where} has {len(node.operands)} operands and {len(node.results)} results, the plan gives "
                f"{strategy}: search again"
            )
    return PlacedOp(
        node=node,
        batch=replicated(node) if plan.parts == 1 else batch,
        tensor=replicated(node) if plan.mesh.size("tp") == 1 else tensor,
    )


def _match(plan: Plan, nodes: Sequence[OpNode], layout: Layout) -> list[tuple[str, OpPlacement]]:
    """Pair a segment's nodes with the planned ops: by position, or by name where the call left some ops out.

    The latter is a call without targets: the ops of the loss are missing, the rest has the names it had.
    """
    if len(nodes) == len(layout.ops):
        return [(node.name, op) for node, op in zip(nodes, layout.ops, strict=True)]
    by_name = {op.node: op for op in layout.ops}
    return [(node.name, _same_op(plan, node, by_name.get(node.name))) for node in nodes]


def _same_op(plan: Plan, node: OpNode, found: Found | None) -> Found:
    if found is None:
        raise PlanError(
            f"the plan for {plan.model!r} has no op {node.name} ({node.where}): this call runs a different graph from "
            "the one that was planned; call the model as it was planned, or search again for this way of calling it"
        )
    return found


def _layouts(plan: Plan) -> list[Layout]:
    by_name = {layout.name: layout for layout in plan.layouts}
    return [by_name[name] for stage in plan.stages for name in stage.layouts]


def _value(name: str, meta: TensorMeta, batch: Placement, tensor: Placement) -> PlacedValue:
    return PlacedValue(name=name, meta=meta, batch=batch, tensor=tensor)
