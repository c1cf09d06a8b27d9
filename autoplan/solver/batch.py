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
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from autoplan.errors import InputError
from autoplan.ir import Arg, Graph, OpNode, Ref, SegmentedGraph, refs_in
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
    grads: frozenset[str] = field(repr=False, compare=False)
    """Values that a gradient flows to."""
    slices: Mapping[str, tuple[tuple[str, Shard], ...]] = field(repr=False, compare=False)
    """Node to those operands that it reads as a slice of the samples although they are made whole."""
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
class _Use:
    """A node with what it reads, looked up once, and what it has in common with others."""

    node: OpNode
    operands: tuple[str, ...]
    alike: Hashable
    """Everything that bears on its strategies; equal for the nodes of equal layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    graph: Graph
    grads: frozenset[str]
    uses: tuple[_Use, ...] = field(init=False)
    known: dict[Hashable, tuple[Strategy, ...]] = field(default_factory=dict)
    fitting: dict[Hashable, Strategy] = field(default_factory=dict)
    ordered: dict[Hashable, Strategy] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Look up what every node reads."""
        object.__setattr__(self, "uses", tuple(map(self._use, self.graph.nodes)))

    def _use(self, node: OpNode) -> _Use:
        operands, results = node.operands, node.results
        number = {name: i for i, name in enumerate((*operands, *results))}
        alike = (
            node.op,
            unnamed(node.args, number),
            tuple((key, unnamed(arg, number)) for key, arg in node.kwargs),
            tuple((self.graph.metas[name], name in self.grads) for name in number),
        )
        return _Use(node=node, operands=operands, alike=alike)

    def strategies(self, use: _Use) -> tuple[Strategy, ...]:
        if use.alike not in self.known:
            self.known[use.alike] = strategies(
                use.node, self.graph.metas, self.grads.__contains__, self.graph.batch_size
            )
        return self.known[use.alike]

    def whole(self, value: str) -> Replicate:
        """How a value that is the same in all parts is placed."""
        return REPLICATE_PARTIAL_GRAD if value in self.grads else REPLICATE


def unnamed(arg: Arg, number: Mapping[str, int]) -> Hashable:
    """An argument with numbers in the place of names. Types count: 1 and True and 1.0 are different arguments."""
    if isinstance(arg, Ref):
        return "value", number[arg.name]
    return tuple(unnamed(item, number) for item in arg) if isinstance(arg, tuple) else (type(arg), arg)


class _Obstacle(Exception):
    """The samples cannot be split; the message says where."""


def split_batch(segmented: SegmentedGraph) -> BatchSplit:
    """Derive the split of the samples. Where there is none, the result says so in ``obstacle``.

    Raises RuleError for ops without a sharding rule.
    """
    graph = segmented.graph
    check_rules(graph.nodes)
    grads = grad_values(graph)
    if graph.batch_size < 2:
        return _unsplit(graph, grads, f"a batch of {graph.batch_size} cannot be divided")
    if all(item.batch_dim is None for item in graph.inputs):
        return _unsplit(graph, grads, "no input has a dim that counts samples")
    try:
        return _split(_Setting(graph=graph, grads=grads))
    except _Obstacle as obstacle:
        return _unsplit(graph, grads, str(obstacle))


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


def _unsplit(graph: Graph, grads: frozenset[str], obstacle: str) -> BatchSplit:
    whole = [
        (n.name, Strategy(inputs=(REPLICATE,) * len(n.operands), outputs=(REPLICATE,) * len(n.results)))
        for n in graph.nodes
    ]
    return BatchSplit(
        inputs=tuple((item.value, REPLICATE) for item in graph.inputs),
        strategies=tuple(whole),
        obstacle=obstacle,
        grads=grads,
        slices={},
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
        grads=setting.grads,
        slices={use.node.name: found for use in setting.uses if (found := _sliced(use, chosen, placements))},
        placement_of=placements,
    )


def _sliced(
    use: _Use, chosen: Mapping[str, Strategy], placements: Mapping[str, Placement]
) -> tuple[tuple[str, Shard], ...]:
    wanted = zip(use.operands, chosen[use.node.name].inputs, strict=True)
    return tuple(
        (name, place) for name, place in wanted
        if isinstance(place, Shard) and not isinstance(placements[name], Shard)
    )  # fmt: skip


def _leaves(setting: _Setting) -> dict[str, Placement]:
    """Placements of all values that no node makes."""
    graph = setting.graph
    placements: dict[str, Placement] = {param.value: setting.whole(param.value) for param in graph.params}
    placements |= {name: REPLICATE for name, _ in graph.constants}
    for item in graph.inputs:
        placements[item.value] = REPLICATE if item.batch_dim is None else Shard(item.batch_dim)
    return placements


def _forward(setting: _Setting, placements: dict[str, Placement], chosen: dict[str, Strategy]) -> list[_Use]:
    """Decide every node that reads samples, in order; return the free ones."""
    free = []
    for use in setting.uses:
        node = use.node
        found = tuple(map(placements.get, use.operands))
        reads_samples = any(isinstance(place, Shard | Partial) for place in found)
        if not reads_samples or (node.op in FACTORIES and not node.op.endswith("_like.default")):
            free.append(use)
            continue
        key = use.alike, found
        if key not in setting.fitting:
            setting.fitting[key] = _fitting(setting, use, placements)
        strategy = chosen[node.name] = setting.fitting[key]
        placements.update(zip(node.results, strategy.outputs, strict=True))
    return free


def _fitting(setting: _Setting, use: _Use, placements: dict[str, Placement]) -> Strategy:
    found = [s for s in setting.strategies(use) if _accepts(setting, use, s, placements)]
    found.sort(key=lambda s: (sum(not isinstance(p, Shard) for p in s.outputs), _slices(use, s, placements)))
    if not found:
        reads = ", ".join(f"{name} as {placements.get(name, 'whole')}" for name in use.operands)
        raise _Obstacle(f"{use.node.where} mixes samples, or its rule cannot tell them apart (it reads {reads})")
    return found[0]


def _slices(use: _Use, strategy: Strategy, placements: dict[str, Placement]) -> int:
    return sum(placements.get(name) not in (None, p) for name, p in zip(use.operands, strategy.inputs, strict=True))


def _accepts(setting: _Setting, use: _Use, strategy: Strategy, placements: dict[str, Placement]) -> bool:
    return all(
        _reachable(placements.get(name, setting.whole(name)), wanted)
        for name, wanted in zip(use.operands, strategy.inputs, strict=True)
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
    setting: _Setting, placements: dict[str, Placement], chosen: dict[str, Strategy], free: list[_Use]
) -> None:
    """Decide the free nodes from the last to the first, by what their readers want."""
    wanted: dict[str, set[Placement]] = defaultdict(set)
    for use in setting.uses:
        if use.node.name in chosen:
            _want(wanted, use, chosen[use.node.name])
    for name in _returned(setting.graph):
        wanted[name].add(setting.whole(name))
    for use in reversed(free):
        strategy = chosen[use.node.name] = _made_to_order(setting, use, placements, wanted)
        placements.update(zip(use.node.results, strategy.outputs, strict=True))
        _want(wanted, use, strategy)


def _want(wanted: dict[str, set[Placement]], use: _Use, strategy: Strategy) -> None:
    for name, placement in zip(use.operands, strategy.inputs, strict=True):
        wanted[name].add(placement)


def _made_to_order(
    setting: _Setting, use: _Use, placements: dict[str, Placement], wanted: dict[str, set[Placement]]
) -> Strategy:
    results = use.node.results
    orders = tuple(_order(setting, name, wanted[name]) for name in results)
    key = use.alike, tuple(map(placements.get, use.operands)), orders
    if key not in setting.ordered:
        possible = [s for s in setting.strategies(use) if _accepts(setting, use, s, placements)]
        by_outputs = {strategy.outputs: strategy for strategy in reversed(possible)}
        whole = tuple(map(setting.whole, results))
        found = by_outputs.get(orders) or by_outputs.get(whole)
        assert found is not None, f"{use.node.where} cannot be run whole; every rule offers that"
        setting.ordered[key] = found
    return setting.ordered[key]


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
