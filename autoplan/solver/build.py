"""A class of segments on the tensor axis -> its Problem: candidates from the rules, prices from the cost model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoplan.cost import Collective, Work
from autoplan.ir import Graph, OpNode, Segment, SegmentedGraph, TensorMeta, refs_in
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
from autoplan.solver.batch import BatchSplit, unnamed
from autoplan.solver.problem import (
    Axis,
    Candidate,
    NodeMemo,
    NodeProblem,
    Problem,
    Storage,
    ValueProblem,
    local_bytes,
    local_meta,
    make_problem,
    param_sources,
    wants_of,
)
from autoplan.solver.rules import block_counts_in, strategies
from autoplan.solver.saved import saved, saved_extra_bytes
from autoplan.solver.work import SAME_VALUES, backward_work, forward_work, is_view, weight_share, work_kind


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
        known = self.sliced.get(node.name, {})
        return {name: known.get(name) or self.graph.metas[name] for name in (*node.operands, *node.results)}

    def needs_grad(self, value: str) -> bool:
        """Whether a gradient flows to the value."""
        return value in self.grads

    def is_weight(self, value: str) -> bool:
        """Whether it is a parameter, or one that was cast or viewed."""
        while not value.startswith("param:"):
            node = self.nodes.get(value)
            if node is None or node.op not in SAME_VALUES:
                return False
            value = next(refs_in(node.args), "")
        return True

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
        grads=split.grads,
        block_counts=block_counts_in(sg.graph.nodes),
        made_in=made_in,
        sliced={} if parts == 1 else {n: _sliced(sg.graph, found, parts) for n, found in split.slices.items()},
    )


def _sliced(whole: Graph, slices: Iterable[tuple[str, Shard]], parts: int) -> dict[str, TensorMeta]:
    return {
        name: replace(whole.metas[name], shape=local_shape(whole.metas[name].shape, place, parts, 0))
        for name, place in slices
    }


def crossing_placement(meta: TensorMeta, degree: int, sequence: bool) -> Placement:
    """How a value crosses to a later segment: whole, or split along its sequence (dim 1) where that divides."""
    if sequence and len(meta.shape) > 1 and meta.shape[1] % degree == 0 and can_split(meta.shape[1], degree):
        return Shard(1)
    return REPLICATE


def build_problem(model: Model, segment: Segment, axis: Axis, sequence: bool) -> Problem:
    """The problem of the class that ``segment`` belongs to. Raises RuleError for an op without a rule."""
    nodes = tuple(_node(model, model.nodes[name], axis) for name in segment.nodes)
    wants: dict[str, dict[Placement, None]] = {}
    for name, place in wants_of(nodes):
        wants.setdefault(name, {})[place] = None
    values = [_param(model, name, wants[name], axis) for name in segment.params if name in wants]
    values += [_arriving(model, name, axis, sequence) for name in segment.inputs]
    values += [_made(model, result) for node in nodes for result in node.results]
    outputs = tuple((name, _leaving(model, name, axis, sequence)) for name in segment.outputs)
    return make_problem(nodes, tuple(values), outputs, axis)


def _param(model: Model, name: str, wanted: Iterable[Placement], axis: Axis) -> ValueProblem:
    meta, trainable = model.graph.metas[name], model.needs_grad(name)
    sources: tuple[Placement, ...] = (REPLICATE,)
    if axis.degree > 1:
        sources = param_sources(wanted, trainable)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A node with what it reads and makes: its place in the model, looked up once."""

    node: OpNode
    operands: tuple[str, ...]
    results: tuple[str, ...]
    metas: Mapping[str, TensorMeta]
    grads: frozenset[str]
    weights: frozenset[str]
    """Operands that are parameters."""
    memo: NodeMemo
    """What the axis knows of nodes that differ from this one in names only."""


def _node(model: Model, node: OpNode, axis: Axis) -> NodeProblem:
    use = _use(model, node, axis)
    memo, counts = use.memo, model.block_counts
    key = node.name, counts
    if key not in memo.problems:
        if counts not in memo.strategies:
            memo.strategies[counts] = strategies(node, use.metas, model.needs_grad, axis.degree, counts)
        memo.problems[key] = _node_problem(use, memo.strategies[counts], axis)
    return memo.problems[key]


def node_problem(model: Model, node: OpNode, found: Iterable[Strategy], axis: Axis) -> NodeProblem:
    """A node with the strategies it may use, each with its price."""
    return _node_problem(_use(model, node, axis), found, axis)


def _use(model: Model, node: OpNode, axis: Axis) -> _Use:
    operands, results, metas = node.operands, node.results, model.metas_for(node)
    grads = frozenset(name for name in metas if model.needs_grad(name))
    weights = frozenset(name for name in operands if model.is_weight(name))
    number = {name: i for i, name in enumerate(metas)}
    key = (
        node.op,
        unnamed(node.args, number),
        tuple((name, unnamed(arg, number)) for name, arg in node.kwargs),
        node.outputs,
        tuple((meta, name in grads, name in weights) for name, meta in metas.items()),
    )
    memo = axis.nodes.setdefault(key, NodeMemo())
    return _Use(node=node, operands=operands, results=results, metas=metas, grads=grads, weights=weights, memo=memo)


def _node_problem(use: _Use, found: Iterable[Strategy], axis: Axis) -> NodeProblem:
    known, kept = use.memo.prices, _kept(use)
    candidates = []
    for strategy in found:
        if strategy not in known:
            known[strategy] = _price(use, strategy, axis)
        storages = _storages(use, strategy, kept)
        candidates.append(replace(known[strategy], saved=storages) if storages else known[strategy])
    return NodeProblem(
        name=use.node.name,
        operands=use.operands,
        results=use.results,
        candidates=prune(tuple(candidates)),
        is_view=is_view(use.node, tuple(use.metas[name] for name in use.operands)),
        is_heavy=work_kind(use.node) != "memory",
    )


def _price(use: _Use, strategy: Strategy, axis: Axis) -> Candidate:
    node, has_backward = use.node, _has_backward(use)
    forward, backward = _works(use, strategy, axis)
    operands = _local(use.metas, use.operands, strategy.inputs, axis)
    results = _local(use.metas, use.results, strategy.outputs, axis)
    dispatched, returned = experts.internal_collectives(node, strategy, operands, axis.group)
    internal = _internal(strategy, operands, axis) + dispatched
    internal_backward = returned if has_backward else ()
    backward_us = _us(backward, axis)
    return Candidate(
        strategy=strategy,
        forward_us=_us(forward, axis),
        backward_us=backward_us,
        weight_us=backward_us * weight_share(node, operands, *_gradients(use)),
        internal=internal,
        internal_us=sum(map(axis.cost.collective_us, internal)),
        internal_backward=internal_backward,
        internal_backward_us=sum(map(axis.cost.collective_us, internal_backward)),
        extra_bytes=saved_extra_bytes(node, operands, results) if has_backward else 0,
    )


def node_works(model: Model, node: OpNode, strategy: Strategy, axis: Axis) -> tuple[Work | None, Work | None]:
    """What one device does for the op by a strategy, forward and backward: the work whose times are its price."""
    return _works(_use(model, node, axis), strategy, axis)


def _works(use: _Use, strategy: Strategy, axis: Axis) -> tuple[Work | None, Work | None]:
    operands = _local(use.metas, use.operands, strategy.inputs, axis)
    results = _local(use.metas, use.results, strategy.outputs, axis)
    needs, _ = _gradients(use)
    return forward_work(use.node, operands, results), backward_work(use.node, operands, results, needs)


def _gradients(use: _Use) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """By operand: whether its gradient is wanted, and whether it is a parameter."""
    return tuple(name in use.grads for name in use.operands), tuple(name in use.weights for name in use.operands)


def _storages(use: _Use, strategy: Strategy, kept: frozenset[str]) -> tuple[Storage, ...]:
    if not kept:
        return ()
    pairs = (*zip(use.operands, strategy.inputs, strict=True), *zip(use.results, strategy.outputs, strict=True))
    return tuple(dict.fromkeys(pair for pair in pairs if pair[0] in kept))


_PRODUCTS = frozenset(
    {"aten.mul.Tensor", "aten.linear.default", "aten.mm.default", "aten.bmm.default", "aten.matmul.default"}
)


def _has_backward(use: _Use) -> bool:
    return not use.grads.isdisjoint(use.results)


def _kept(use: _Use) -> frozenset[str]:
    """Values that the op keeps for backward. A factor of a product is kept only for the other factor's gradient."""
    if not _has_backward(use):
        return frozenset()
    positions = saved(use.node)
    operands = [use.operands[i] for i in positions.operands]
    if use.node.op in _PRODUCTS and len(operands) == 2:
        operands = [mine for mine, other in zip(operands, reversed(operands), strict=True) if other in use.grads]
    return frozenset(operands) | {use.results[i] for i in positions.results}


def _local(
    seen: Mapping[str, TensorMeta], names: Iterable[str], placements: Iterable[Placement], axis: Axis
) -> tuple[TensorMeta, ...]:
    return tuple(local_meta(seen[name], place, axis) for name, place in zip(names, placements, strict=True))


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
