"""Is a plan legal on this graph? Asked for every graph that runs, since plans are edited and shapes change.

Every strategy must be a row of the rule table for the shapes at hand. Segments of one class are equal, so one of each
class of the plan is checked. On the batch axis nothing may communicate and the loss must be a sum over the parts; on
the tensor axis the loss must leave whole, and what crosses between segments whole or split.
"""

from autoplan.errors import PlanError
from autoplan.ir import Graph, OpNode, SegmentedGraph, TensorMeta
from autoplan.localize import localize
from autoplan.plan.place import Placed, PlacedOp, place
from autoplan.plan.plan import Plan
from autoplan.sharding import PARTIAL, REPLICATE, Partial, Replicate, Shard, can_split
from autoplan.solver.rules import block_counts_in, grad_values, strategies


def check_strategies(plan: Plan, segmented: SegmentedGraph) -> None:
    """Raise PlanError naming the op, weight or value that cannot be split as planned on this graph."""
    placed = place(plan, segmented)
    whole = segmented.graph
    first = dict(reversed(list(zip(plan.segment_kinds, segmented.segments, strict=True))))
    nodes = [n for kind in sorted(first) for n in first[kind].nodes]
    _check_axis("batch", whole, [placed.ops[n] for n in (*segmented.prelude, *nodes)], plan.parts)
    batch = {name: op.batch for name, op in placed.ops.items()}
    local = localize(whole, batch, {name: value.batch for name, value in placed.values.items()}, plan.parts)
    _check_axis("tensor", local, [placed.ops[n] for n in nodes], plan.mesh.size("tp"))
    _check_batch_edges(plan, segmented, placed)
    _check_leaving(plan, segmented, placed)
    _check_values(plan, segmented, placed, local)


def _check_axis(axis: str, graph: Graph, ops: list[PlacedOp], degree: int) -> None:
    if degree == 1:
        return
    grads = grad_values(graph)
    by_name = {node.name: node for node in graph.nodes}
    blocks = block_counts_in([by_name[op.node.name] for op in ops])
    for op in ops:
        planned = op.batch if axis == "batch" else op.tensor
        node = by_name[op.node.name]
        if planned not in strategies(node, graph.metas, grads.__contains__, degree, blocks):
            raise PlanError(
                f"{node.where} cannot run as {planned} over {degree} ranks or parts of the {axis} axis: "
                f"{_shapes(node, graph)}. The plan was made for other shapes or edited: search again"
            )


def _shapes(node: OpNode, graph: Graph) -> str:
    operands = ", ".join(str(graph.metas[name]) for name in node.operands)
    return f"its operands are {operands or 'none'}, its results {', '.join(map(str, node.outputs))}"


def _check_batch_edges(plan: Plan, segmented: SegmentedGraph, placed: Placed) -> None:
    if plan.parts == 1:
        return
    graph = segmented.graph
    for op in placed.ops.values():
        for name, wanted in zip(op.node.operands, op.batch.inputs, strict=True):
            found = placed.values[name].batch
            local = found == wanted or (isinstance(found, Replicate) and not isinstance(wanted, Partial))
            if not local:
                raise PlanError(
                    f"{op.node.where} would have to communicate over the batch: {name} is {found}, the plan wants "
                    f"{wanted}: search again"
                )
    if graph.loss is not None and placed.values[graph.loss].batch != PARTIAL:
        raise PlanError(
            f"the plan cuts the batch into {plan.parts} parts, but the loss of this model is no sum over its samples "
            f"({placed.values[graph.loss].batch}): use dp=1 and one microbatch, or search again"
        )


def _check_leaving(plan: Plan, segmented: SegmentedGraph, placed: Placed) -> None:
    if plan.mesh.size("tp") == 1:
        return
    read = {name for segment in segmented.segments for name in segment.inputs}
    for name in (name for segment in segmented.segments for name in segment.outputs):
        found = placed.values[name].tensor
        is_loss = name == segmented.graph.loss
        if (is_loss and found != REPLICATE) or (name in read and found != REPLICATE and not isinstance(found, Shard)):
            wanted = "Replicate" if is_loss else "Replicate or Shard"
            raise PlanError(f"{name} must leave its segment as {wanted}, the plan says {found}: search again")


def _check_values(plan: Plan, segmented: SegmentedGraph, placed: Placed, local: Graph) -> None:
    """Parameters and values that cross segments split as planned."""
    tp = plan.mesh.size("tp")
    shapes: dict[str, TensorMeta] = {p.value: p.meta for p in local.params}
    shapes |= {name: local.metas[name] for segment in segmented.segments for name in segment.outputs}
    for name, meta in shapes.items():
        value = placed.values.get(name)
        split = value.tensor if value is not None else None
        if isinstance(split, Shard) and tp > 1:
            fits = split.dim < len(meta.shape) and can_split(meta.shape[split.dim], tp, split.blocks)
            if not fits:
                raise PlanError(f"{name.removeprefix('param:')} {meta} cannot be {split} over tp={tp}: search again")
