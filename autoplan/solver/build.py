"""A class of segments on the tensor axis -> its Problem: candidates from the rules, prices from the cost model."""

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoplan.cost import Collective, Work
from autoplan.ir import Graph, OpNode, Segment, SegmentedGraph, TensorMeta
from autoplan.localize import localize
from autoplan.sharding import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    CollectiveKind,
    Placement,
    Shard,
    Strategy,
    can_split,
    local_shape,
)
from autoplan.solver import experts
from autoplan.solver.batch import BatchSplit
from autoplan.solver.problem import (
    Axis,
    Candidate,
    NodeProblem,
    Problem,
    Storage,
    ValueProblem,
    local_bytes,
    make_problem,
    param_sources,
    wants_of,
)
from autoplan.solver.rules import block_counts_in, grad_values, strategies
from autoplan.solver.saved import saved, saved_extra_bytes
from autoplan.solver.work import backward_work, forward_work, is_view, work_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The model at one microbatch size, with what every problem about it needs."""

    sg: SegmentedGraph
    """As traced, at the global batch size."""
    graph: Graph
    """The same graph with the shapes of one microbatch."""
    nodes: Mapping[str, OpNode]
    grads: frozenset[str]
    """Values that a gradient flows to."""
    block_counts: frozenset[int]
    made_in: Mapping[str, int]
    """Value to the index of the segment that makes it."""
    sliced: Mapping[str, Mapping[str, TensorMeta]]
    """Node to those operands that it reads as a slice of the samples, with the shape of the slice."""

    def metas_for(self, node: OpNode) -> Mapping[str, TensorMeta]:
        """Shapes of values as the node sees them."""
        return (
            ChainMap(dict(self.sliced[node.name]), dict(self.graph.metas))
            if node.name in self.sliced
            else self.graph.metas
        )

    def needs_grad(self, value: str) -> bool:
        """Whether a gradient flows to the value."""
        return value in self.grads

    def is_boundary(self, value: str) -> bool:
        """Whether a segment makes it, so that it may cross into later ones."""
        return value in self.made_in


def make_model(sg: SegmentedGraph, split: BatchSplit, parts: int) -> Model:
    """The model with the shapes of one of ``parts`` equal parts of the batch."""
    graph = localize(sg.graph, split.strategy_of, split.placement_of, parts)
    nodes = {node.name: node for node in graph.nodes}
    made_in = {
        result: index for index, segment in enumerate(sg.segments) for n in segment.nodes for result in nodes[n].results
    }
    return Model(
        sg=sg,
        graph=graph,
        nodes=nodes,
        grads=grad_values(sg.graph),
        block_counts=block_counts_in(sg.graph.nodes),
        made_in=made_in,
        sliced={node.name: found for node in sg.graph.nodes if (found := _slices(sg.graph, split, node, parts))},
    )


def _slices(whole: Graph, split: BatchSplit, node: OpNode, parts: int) -> dict[str, TensorMeta]:
    if parts == 1:
        return {}
    wanted = zip(node.operands, split.strategy(node.name).inputs, strict=True)
    return {
        name: replace(whole.metas[name], shape=local_shape(whole.metas[name].shape, place, parts, 0))
        for name, place in wanted
        if isinstance(place, Shard) and not isinstance(split.placement(name), Shard)
    }


def crossing_placement(meta: TensorMeta, degree: int, sequence: bool) -> Placement:
    """How a value crosses to a later segment: whole, or split along its sequence (dim 1) where that divides."""
    if sequence and len(meta.shape) > 1 and meta.shape[1] % degree == 0 and can_split(meta.shape[1], degree):
        return Shard(1)
    return REPLICATE


def build_problem(model: Model, segment: Segment, axis: Axis, sequence: bool) -> Problem:
    """The problem of the class that ``segment`` belongs to. Raises RuleError for an op without a rule."""
    nodes = tuple(_node(model, model.nodes[name], axis) for name in segment.nodes)
    read = {name for node in nodes for name in node.operands}
    values = [_param(model, name, nodes, axis) for name in segment.params if name in read]
    values += [_arriving(model, name, axis, sequence) for name in segment.inputs]
    values += [_made(model, result) for node in nodes for result in node.results]
    outputs = tuple((name, _leaving(model, name, axis, sequence)) for name in segment.outputs)
    return make_problem(nodes, tuple(values), outputs, axis)


def _param(model: Model, name: str, nodes: tuple[NodeProblem, ...], axis: Axis) -> ValueProblem:
    meta, trainable = model.graph.metas[name], model.needs_grad(name)
    sources: tuple[Placement, ...] = (REPLICATE,)
    if axis.degree > 1:
        sources = param_sources({place for value, place in wants_of(nodes) if value == name}, trainable)
    sync = tuple(_sync_us(meta, source, axis) for source in sources)
    return ValueProblem(name=name, meta=meta, origin="param", needs_grad=trainable, sources=sources, sync_us=sync)


def _sync_us(meta: TensorMeta, source: Placement, axis: Axis) -> float:
    if source != REPLICATE_PARTIAL_GRAD:
        return 0.0
    return axis.cost.collective_us(
        Collective(kind=CollectiveKind.ALL_REDUCE, num_bytes=meta.num_bytes, group=axis.group)
    )


def _arriving(model: Model, name: str, axis: Axis, sequence: bool) -> ValueProblem:
    meta, crosses = model.graph.metas[name], model.is_boundary(name)
    source = crossing_placement(meta, axis.degree, sequence) if crosses else REPLICATE
    return ValueProblem(
        name=name,
        meta=meta,
        origin="input" if crosses else "given",
        needs_grad=model.needs_grad(name),
        sources=(source,),
    )


def _made(model: Model, name: str) -> ValueProblem:
    return ValueProblem(
        name=name, meta=model.graph.metas[name], origin="node", needs_grad=model.needs_grad(name), sources=()
    )


def _leaving(model: Model, name: str, axis: Axis, sequence: bool) -> Placement | None:
    if name == model.sg.graph.loss:
        return REPLICATE
    if name in crossing_values(model.sg):
        return crossing_placement(model.graph.metas[name], axis.degree, sequence)
    return None


def crossing_values(sg: SegmentedGraph) -> frozenset[str]:
    """Values that one segment makes and a later one reads."""
    outputs = {name for segment in sg.segments for name in segment.outputs}
    return frozenset(outputs.intersection(name for segment in sg.segments for name in segment.inputs))


def _node(model: Model, node: OpNode, axis: Axis) -> NodeProblem:
    found = strategies(node, model.metas_for(node), model.needs_grad, axis.degree, model.block_counts)
    return node_problem(model, node, found, axis)


def node_problem(model: Model, node: OpNode, found: Iterable[Strategy], axis: Axis) -> NodeProblem:
    """A node with the strategies it may use, each with its price."""
    seen = model.metas_for(node)
    metas = tuple(seen[name] for name in node.operands)
    kept = _kept(model, node)
    return NodeProblem(
        name=node.name,
        operands=node.operands,
        results=node.results,
        candidates=prune(tuple(_candidate(model, node, strategy, kept, axis) for strategy in found)),
        is_view=is_view(node, metas),
        is_heavy=work_kind(node) != "memory",
    )


def _candidate(model: Model, node: OpNode, strategy: Strategy, kept: frozenset[str], axis: Axis) -> Candidate:
    seen = model.metas_for(node)
    operands = _local(seen, node.operands, strategy.inputs, axis)
    results = _local(seen, node.results, strategy.outputs, axis)
    needs = tuple(map(model.needs_grad, node.operands))
    exchanged, exchanged_back = experts.internal_collectives(node, strategy, operands, axis.group)
    internal = _internal(strategy, operands, axis) + exchanged
    has_backward = _has_backward(model, node)
    storages: dict[Storage, None] = dict.fromkeys(
        (name, place)
        for name, place in (
            *zip(node.operands, strategy.inputs, strict=True),
            *zip(node.results, strategy.outputs, strict=True),
        )
        if name in kept
    )
    return Candidate(
        strategy=strategy,
        forward_us=_us(forward_work(node, operands, results), axis),
        backward_us=_us(backward_work(node, operands, results, needs), axis),
        internal=internal,
        internal_us=sum(map(axis.cost.collective_us, internal)),
        internal_backward=exchanged_back if has_backward else (),
        internal_backward_us=sum(map(axis.cost.collective_us, exchanged_back)) if has_backward else 0.0,
        saved=tuple(storages),
        extra_bytes=saved_extra_bytes(node, operands, results) if has_backward else 0,
    )


_PRODUCTS = frozenset(
    {"aten.mul.Tensor", "aten.linear.default", "aten.mm.default", "aten.bmm.default", "aten.matmul.default"}
)


def _has_backward(model: Model, node: OpNode) -> bool:
    return any(map(model.needs_grad, node.results))


def _kept(model: Model, node: OpNode) -> frozenset[str]:
    """Values that the op keeps for backward. A factor of a product is kept only for the other factor's gradient."""
    if not _has_backward(model, node):
        return frozenset()
    positions = saved(node)
    operands = [node.operands[i] for i in positions.operands]
    if node.op in _PRODUCTS and len(operands) == 2:
        operands = [mine for mine, other in zip(operands, reversed(operands), strict=True) if model.needs_grad(other)]
    return frozenset(operands) | {node.results[i] for i in positions.results}


def _local(
    seen: Mapping[str, TensorMeta], names: Iterable[str], placements: Iterable[Placement], axis: Axis
) -> tuple[TensorMeta, ...]:
    metas = ((seen[name], place) for name, place in zip(names, placements, strict=True))
    return tuple(
        TensorMeta(shape=local_shape(meta.shape, place, axis.degree, 0), dtype=meta.dtype) for meta, place in metas
    )


def _us(work: Work | None, axis: Axis) -> float:
    return 0.0 if work is None else axis.cost.compute_us(work)


def _internal(strategy: Strategy, operands: tuple[TensorMeta, ...], axis: Axis) -> tuple[Collective, ...]:
    """A vocabulary-split loss needs the largest logit, then two sums, of every row over all ranks."""
    if strategy.local != "cross_entropy_vocab":
        return ()
    logits = operands[0]
    row = TensorMeta(shape=logits.shape[:1], dtype=logits.dtype).num_bytes
    return tuple(
        Collective(kind=CollectiveKind.ALL_REDUCE, num_bytes=num_bytes, group=axis.group)
        for num_bytes in (row, 2 * row)
    )


def prune(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Leave out what is never better: same placements, no less time, no less memory."""
    best: dict[tuple[object, ...], Candidate] = {}
    for candidate in candidates:
        key = (candidate.strategy.inputs, candidate.strategy.outputs, candidate.saved)
        if key not in best or candidate.total_us < best[key].total_us:
            best[key] = candidate
    return tuple(best.values())


def param_bytes(problem: Problem, placements: Mapping[str, Placement]) -> int:
    """Bytes of the problem's parameters on one device."""
    return sum(local_bytes(v.meta, placements[v.name], problem.degree) for v in problem.values if v.origin == "param")
