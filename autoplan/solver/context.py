"""The split of the sequence over the context axis: each class of segments solved on it once, by the ILP of level 1.

In: the model at one microbatch size. Out: a ``Context``, a strategy per node of every class, and from it the model
with shapes local to the axis, on which the tensor axis is solved as always.

What differs from the tensor axis is fixed here: values that cross between segments are split along the sequence;
parameters are whole and their gradients sums over the axis, taken once a step together with those over the data
ranks; values of the prelude are whole and cut locally; the loss stays a partial sum, as it does over the samples, and
is summed once a step. Moves are what is paid a microbatch (``context_cost.py``).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.ir import OpNode, Segment, SegmentedGraph, TensorMeta
from autoplan.localize import localize_node
from autoplan.sharding import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Placement,
    Strategy,
    local_shape,
)
from autoplan.solver.batch import BatchSplit
from autoplan.solver.block import solve_block
from autoplan.solver.build import Model, crossing_values, node_problem
from autoplan.solver.choice import Resolved, resolve
from autoplan.solver.mesh import divisors
from autoplan.solver.problem import Axis, Prices, Problem, ValueProblem, make_problem
from autoplan.solver.rules_context import ContextSetting, segment_strategies
from autoplan.solver.work import ATTENTION_OPS

FASTEST = Prices()
_Origin = Literal["param", "input", "given", "node"]
_SEQUENCE_NDIM = 3
"""A value that crosses between segments as [samples, positions, channels] tells the length of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """How every class of segments runs on the context axis, at one degree and microbatch size."""

    degree: int
    resolved: tuple[Resolved, ...] = field(repr=False)
    """By class, for its first segment."""
    crossing: Mapping[str, Placement] = field(repr=False)
    """Every value that crosses between segments, of all segments."""

    def strategies(self, kind: int) -> dict[str, Strategy]:
        """Strategy of each node of the first segment of a class."""
        return {node.name: candidate.strategy for node, candidate in self.resolved[kind].nodes}

    def placements(self, kind: int) -> Mapping[str, Placement]:
        """Placement of each value of that segment as it is made or arrives."""
        return self.resolved[kind].sources


def sequence_length(sg: SegmentedGraph) -> int | None:
    """Positions of the sequence that runs through the chain; None if there is none."""
    crossing = sorted(crossing_values(sg))
    shapes = [sg.graph.metas[name].shape for name in crossing if sg.graph.metas[name].is_float]
    found = Counter(shape[1] for shape in shapes if len(shape) == _SEQUENCE_NDIM)
    if not found:
        queries = [sg.graph.metas[node.operands[0]].shape for node in sg.graph.nodes if node.op in ATTENTION_OPS]
        found = Counter(shape[-2] for shape in queries)
    return max(found, key=lambda length: (found[length], length)) if found else None


def obstacle(sg: SegmentedGraph, split: BatchSplit) -> str:
    """Why no context axis is possible, in words; empty if one is."""
    if sequence_length(sg) is None:
        return "no value with a sequence dim ([samples, positions, channels]) runs through the model"
    if split.obstacle and sg.graph.batch_size > 1:
        return f"positions cannot be told from samples: {split.obstacle}"
    return ""


def context_degrees(sg: SegmentedGraph, split: BatchSplit, cluster: Cluster) -> tuple[int, ...]:
    """Context degrees worth trying, ascending: each rank gets two equal pieces, so that causal work is even."""
    length = sequence_length(sg)
    if obstacle(sg, split) or length is None:
        return (1,)
    return tuple(degree for degree in divisors(cluster.num_devices) if degree == 1 or length % (2 * degree) == 0)


def make_context(
    model: Model, split: BatchSplit, axis: Axis, *, tensor_degree: int = 1, prices: Prices = FASTEST
) -> Context:
    """The best split of every class over ``axis``, at ``prices`` (time alone without them).

    ``tensor_degree`` forbids attention by exchanged heads where the tensor axis could not split those that are left.
    """
    problems, crossing = context_problems(model, split, axis, tensor_degree)
    return Context(
        degree=axis.degree, resolved=tuple(_solved(problem, prices) for problem in problems), crossing=crossing
    )


def context_problems(
    model: Model, split: BatchSplit, axis: Axis, tensor_degree: int
) -> tuple[Iterator[Problem], Mapping[str, Placement]]:
    """The problem of every class on the context axis, and how values cross between segments there."""
    length = sequence_length(model.sg)
    assert length is not None, "ask obstacle() first"
    setting = ContextSetting(
        model=model,
        split=split,
        samples=_samples(model),
        degree=axis.degree,
        tensor_degree=tensor_degree,
        length=length,
    )
    crossing = {name: setting.positions(name) for name in sorted(crossing_values(model.sg))}
    kinds = range(len(model.sg.kind_names))
    return (_problem(setting, model.sg.representative(kind), axis, crossing) for kind in kinds), crossing


def _samples(model: Model) -> int:
    """Samples in a microbatch."""
    counted = [item.meta.shape[item.batch_dim] for item in model.graph.inputs if item.batch_dim is not None]
    return counted[0] if counted else 1


def _problem(setting: ContextSetting, segment: Segment, axis: Axis, crossing: Mapping[str, Placement]) -> Problem:
    model = setting.model
    ops = tuple(model.nodes[name] for name in segment.nodes)
    found = segment_strategies(setting, ops)
    nodes = tuple(node_problem(model, op, ways, axis) for op, ways in zip(ops, found, strict=True))
    read = {name for node in nodes for name in node.operands}
    values = [_param(model, name) for name in segment.params if name in read]
    values += [_arriving(model, name, crossing) for name in segment.inputs]
    values += [_value(model, result, "node", ()) for node in nodes for result in node.results]
    loss = model.sg.graph.loss
    outputs = tuple((name, PARTIAL if name == loss else crossing.get(name)) for name in segment.outputs)
    return make_problem(nodes, tuple(values), outputs, axis)


def _param(model: Model, name: str) -> ValueProblem:
    source = REPLICATE_PARTIAL_GRAD if model.needs_grad(name) else REPLICATE
    return replace(_value(model, name, "param", (source,)), sync_us=(0.0,))


def _arriving(model: Model, name: str, crossing: Mapping[str, Placement]) -> ValueProblem:
    if name in crossing:
        return _value(model, name, "input", (crossing[name],))
    return _value(model, name, "given", (REPLICATE,))


def _value(model: Model, name: str, origin: _Origin, sources: tuple[Placement, ...]) -> ValueProblem:
    meta = model.graph.metas[name]
    return ValueProblem(name=name, meta=meta, origin=origin, needs_grad=model.needs_grad(name), sources=sources)


def _solved(problem: Problem, prices: Prices) -> Resolved:
    solution = solve_block(problem, prices)
    if solution.choice is None:
        raise InfeasibleError(
            f"no split of the sequence was found for a class of segments ({solution.state.value}): raise the time "
            "limit, or pin cp=1"
        )
    return resolve(problem, solution.choice)


def context_model(model: Model, context: Context) -> Model:
    """The model as one rank of the context axis sees it, for the problems of the tensor axis.

    Shapes are local in the first segment of each class, and for values that cross between any segments.
    """
    ways = {name: way for kind in range(len(context.resolved)) for name, way in context.strategies(kind).items()}
    shape = _LocalShape(degree=context.degree, crossing=context.crossing)
    graph = replace(model.graph, nodes=tuple(shape.of_node(node, ways.get(node.name)) for node in model.graph.nodes))
    seen = {
        name: found
        for name, way in ways.items()
        if (found := _seen_otherwise(model, graph.metas, model.nodes[name], way, context.degree))
    }
    others = {name: found for name, found in model.sliced.items() if name not in ways}
    return replace(model, graph=graph, nodes={node.name: node for node in graph.nodes}, sliced={**others, **seen})


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalShape:
    degree: int
    crossing: Mapping[str, Placement]

    def of_node(self, node: OpNode, way: Strategy | None) -> OpNode:
        """A node whose results have the shapes in which they cross, or in which the node makes them."""
        made = localize_node(node, way, self.degree, 0)
        if self.crossing.keys().isdisjoint(node.results):
            return made
        outputs = (
            _local(whole, self.crossing[name], self.degree) if name in self.crossing else meta
            for name, whole, meta in zip(node.results, node.outputs, made.outputs, strict=True)
        )
        return replace(made, outputs=tuple(outputs))


def _seen_otherwise(
    model: Model, metas: Mapping[str, TensorMeta], node: OpNode, way: Strategy, degree: int
) -> dict[str, TensorMeta]:
    """Operands and results that the node sees in another shape than they are made, or cross, in."""
    before = model.metas_for(node)
    pairs = (*zip(node.operands, way.inputs, strict=True), *zip(node.results, way.outputs, strict=True))
    local = {name: _local(before[name], place, degree) for name, place in pairs}
    return {name: meta for name, meta in local.items() if meta != metas[name]}


def _local(whole: TensorMeta, place: Placement, degree: int) -> TensorMeta:
    return replace(whole, shape=local_shape(whole.shape, place, degree, 0))
