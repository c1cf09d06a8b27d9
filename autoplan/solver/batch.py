"""The split of the samples: which placement every value has on the batch axis, from the same rules as the tensor axis.

In: a segmented graph at the global batch size. Out: a ``BatchSplit``. It holds for every number of parts that divides
the batch, because the rules are asked for as many parts as there are samples.

User inputs arrive as Shard(batch_dim), parameters as Replicate(partial_grad), constants as Replicate. Two passes:

    forward   a node that reads split samples (or partial sums of them) takes the strategy that fits what it reads
    backward  every other node (masks, position tables, what is computed from parameters alone) is *free*: it makes
              what its readers want if they all want the same split, else the whole

Changes on edges are slices: a whole value cut down to a part of the samples. No communication is involved, and the
gradient of a whole value stays a sum over the parts.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from autoplan.errors import InputError
from autoplan.ir import Graph, OpNode, SegmentedGraph, refs_in
from autoplan.sharding import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Partial,
    Placement,
    Replicate,
    Shard,
    Strategy,
)
from autoplan.solver.rules import check_rules, grad_values, strategies
from autoplan.solver.rules_pointwise import FACTORIES


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """How the samples are split, for every number of parts that ``check_parts`` accepts."""

    inputs: tuple[tuple[str, Placement], ...]
    """Placement of each user input value."""
    strategies: tuple[tuple[str, Strategy], ...]
    """Strategy of each node, in the order of the graph, prelude and chain alike."""
    obstacle: str = ""
    """Why the samples cannot be split, in words; everything is Replicate then."""
    strategy_of: dict[str, Strategy] = field(init=False, repr=False, compare=False)
    placement_of: dict[str, Placement] = field(repr=False, compare=False)
    """Placement of each value: parameters, constants, inputs and results."""

    def __post_init__(self) -> None:
        """Index the strategies by node name."""
        object.__setattr__(self, "strategy_of", dict(self.strategies))

    def strategy(self, node: str) -> Strategy:
        """Strategy of the node of that name."""
        return self.strategy_of[node]

    def placement(self, value: str) -> Placement:
        """Placement of a value as it is made, before any reader slices it."""
        return self.placement_of[value]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    graph: Graph
    grads: frozenset[str]

    def strategies(self, node: OpNode) -> tuple[Strategy, ...]:
        return strategies(node, self.graph.metas, self.grads.__contains__, self.graph.batch_size)

    def whole(self, value: str) -> Replicate:
        """How a value that is the same in all parts is placed."""
        return REPLICATE_PARTIAL_GRAD if value in self.grads else REPLICATE


class _Obstacle(Exception):
    """The samples cannot be split; the message says where."""


def split_batch(segmented: SegmentedGraph) -> BatchSplit:
    """Derive the split of the samples. Where there is none, the result says so in ``obstacle``.

    Raises RuleError for ops without a sharding rule.
    """
    graph = segmented.graph
    check_rules(graph.nodes)
    if graph.batch_size < 2:
        return _unsplit(graph, f"a batch of {graph.batch_size} cannot be divided")
    if all(item.batch_dim is None for item in graph.inputs):
        return _unsplit(graph, "no input has a dim that counts samples")
    try:
        return _split(_Setting(graph=graph, grads=grad_values(graph)))
    except _Obstacle as obstacle:
        return _unsplit(graph, str(obstacle))


def check_parts(split: BatchSplit, graph: Graph, parts: int) -> None:
    """Raise InputError if the batch cannot be cut into ``parts`` equal parts (data ranks x microbatches)."""
    if parts == 1:
        return
    if split.obstacle:
        raise InputError(
            f"the batch cannot be split into {parts} parts: {split.obstacle}. "
            "Use one data-parallel rank and one microbatch, or change the model there."
        )
    if graph.batch_size % parts:
        divisors = [n for n in range(1, graph.batch_size + 1) if graph.batch_size % n == 0]
        raise InputError(
            f"a batch of {graph.batch_size} cannot be split into {parts} equal parts (data-parallel ranks x "
            f"microbatches); possible are {', '.join(map(str, divisors))}"
        )


def _unsplit(graph: Graph, obstacle: str) -> BatchSplit:
    whole = [
        (n.name, Strategy(inputs=(REPLICATE,) * len(n.operands), outputs=(REPLICATE,) * len(n.results)))
        for n in graph.nodes
    ]
    return BatchSplit(
        inputs=tuple((item.value, REPLICATE) for item in graph.inputs),
        strategies=tuple(whole),
        obstacle=obstacle,
        placement_of=dict.fromkeys(graph.metas, REPLICATE),
    )


def _split(setting: _Setting) -> BatchSplit:
    graph = setting.graph
    placements = _leaves(setting)
    inputs = tuple((item.value, placements[item.value]) for item in graph.inputs)
    chosen: dict[str, Strategy] = {}
    free = _forward(setting, placements, chosen)
    _backward(setting, placements, chosen, free)
    _check_outputs(graph, placements)
    return BatchSplit(
        inputs=inputs,
        strategies=tuple((node.name, chosen[node.name]) for node in graph.nodes),
        placement_of=placements,
    )


def _leaves(setting: _Setting) -> dict[str, Placement]:
    """Placements of all values that no node makes."""
    graph = setting.graph
    placements: dict[str, Placement] = {param.value: setting.whole(param.value) for param in graph.params}
    placements |= {name: REPLICATE for name, _ in graph.constants}
    for item in graph.inputs:
        placements[item.value] = REPLICATE if item.batch_dim is None else Shard(item.batch_dim)
    return placements


def _forward(setting: _Setting, placements: dict[str, Placement], chosen: dict[str, Strategy]) -> list[OpNode]:
    """Decide every node that reads samples, in order; return the free ones."""
    free = []
    for node in setting.graph.nodes:
        reads_samples = any(isinstance(placements.get(name), Shard | Partial) for name in node.operands)
        if not reads_samples or (node.op in FACTORIES and not node.op.endswith("_like.default")):
            free.append(node)
            continue
        strategy = _fitting(setting, node, placements)
        chosen[node.name] = strategy
        placements.update(zip(node.results, strategy.outputs, strict=True))
    return free


def _fitting(setting: _Setting, node: OpNode, placements: dict[str, Placement]) -> Strategy:
    found = [s for s in setting.strategies(node) if _accepts(setting, node, s, placements)]
    found.sort(key=lambda s: (sum(not isinstance(p, Shard) for p in s.outputs), _slices(node, s, placements)))
    if not found:
        reads = ", ".join(f"{name} as {placements.get(name, 'whole')}" for name in node.operands)
        raise _Obstacle(f"{node.where} mixes samples, or its rule cannot tell them apart (it reads {reads})")
    return found[0]


def _slices(node: OpNode, strategy: Strategy, placements: dict[str, Placement]) -> int:
    return sum(placements.get(name) not in (None, p) for name, p in zip(node.operands, strategy.inputs, strict=True))


def _accepts(setting: _Setting, node: OpNode, strategy: Strategy, placements: dict[str, Placement]) -> bool:
    return all(
        _reachable(placements.get(name, setting.whole(name)), wanted)
        for name, wanted in zip(node.operands, strategy.inputs, strict=True)
    )


def _reachable(found: Placement, wanted: Placement) -> bool:
    """Whether a value can be had in a placement without communication and with a right gradient."""
    match found:
        case Shard() | Partial():
            return found == wanted
        case Replicate():
            return found == wanted or isinstance(wanted, Shard)
        case _:
            assert_never(found)


def _backward(
    setting: _Setting, placements: dict[str, Placement], chosen: dict[str, Strategy], free: list[OpNode]
) -> None:
    """Decide the free nodes from the last to the first, by what their readers want."""
    wanted: dict[str, set[Placement]] = defaultdict(set)
    for node in setting.graph.nodes:
        if node.name in chosen:
            _want(wanted, node, chosen[node.name])
    for name in _returned(setting.graph):
        wanted[name].add(setting.whole(name))
    for node in reversed(free):
        strategy = _made_to_order(setting, node, placements, wanted)
        chosen[node.name] = strategy
        placements.update(zip(node.results, strategy.outputs, strict=True))
        _want(wanted, node, strategy)


def _want(wanted: dict[str, set[Placement]], node: OpNode, strategy: Strategy) -> None:
    for name, placement in zip(node.operands, strategy.inputs, strict=True):
        wanted[name].add(placement)


def _made_to_order(
    setting: _Setting, node: OpNode, placements: dict[str, Placement], wanted: dict[str, set[Placement]]
) -> Strategy:
    orders = [_order(setting, name, wanted[name]) for name in node.results]
    whole = [setting.whole(name) for name in node.results]
    possible = [s for s in setting.strategies(node) if _accepts(setting, node, s, placements)]
    for outputs in (tuple(orders), tuple(whole)):
        for strategy in possible:
            if strategy.outputs == outputs:
                return strategy
    raise AssertionError(f"{node.where} cannot be run whole; every rule offers that")


def _order(setting: _Setting, name: str, wanted: set[Placement]) -> Placement:
    """The one split that all readers want, or the whole."""
    if len(wanted) == 1:
        (only,) = wanted
        if isinstance(only, Shard):
            return only
    return setting.whole(name)


def _returned(graph: Graph) -> Iterable[str]:
    return [*refs_in(graph.outputs), *([graph.loss] if graph.loss else [])]


def _check_outputs(graph: Graph, placements: dict[str, Placement]) -> None:
    """A loss has to be a sum over the samples; whole would mean that no sample reaches it."""
    if graph.loss is not None and placements[graph.loss] != PARTIAL:
        raise _Obstacle(f"the loss {graph.loss} is {placements[graph.loss]} over the samples, not a sum over them")
