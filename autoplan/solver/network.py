"""A Problem as a sum of small tables, for ``eliminate.py``.

Variables: the candidate of each node and the placement of each parameter; with an activation price also, for each
result of a view, whether its memory must stay for backward.
Every value gives a table over its producer and its readers: what its moves cost, each (value, placement) once, and
what it keeps. Sets of placements are bit masks, so a table is a product: (mask of what is wanted) x (cost of a move).
Such a table grows with each reader. Where there are many, a *hub* stands between, a variable whose state is the set of
placements wanted. Or each reader pays a share of what it wants, a k-th at first, which together is never more than the
value costs: this *relaxed* network bounds every answer from below and needs small tables only.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autoplan.sharding import Placement
from autoplan.solver.choice import TIE_BREAK_US, Choice
from autoplan.solver.eliminate import Costs, Elimination, Minimum, Scope, plan_elimination
from autoplan.solver.problem import NodeProblem, Prices, Problem, ValueProblem, local_bytes
from autoplan.solver.shares import Shared

UNITS_PER_US = 1e6
"""Costs are counted in whole millionths of a microsecond."""
_MOST_READERS = 2
"""More readers than these meet in a hub."""

Flags = npt.NDArray[np.bool_]
Masks = npt.NDArray[np.int64]
Table = tuple[Scope, Costs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The tables of one problem, those that prices change left open, and the order of elimination."""

    problem: Problem
    params: tuple[str, ...]
    """Their variables follow those of the nodes."""
    moves: tuple[Table, ...]
    kept_bytes: tuple[Table, ...]
    """To be multiplied by the price of memory."""
    relaxed: bool
    plan: Elimination
    """For the moves, the kept bytes, one table per node and one per parameter."""
    shared: tuple[Shared, ...] = ()
    """Of a relaxed network: the values whose moves are paid in shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Masks:
    """Per state of the variables in ``scope``, a set of placements."""

    scope: Scope
    masks: Masks


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueFacts:
    """What the tables of one value are made from."""

    value: ValueProblem
    producer: Scope
    """Its variable; none when the value always arrives the same way."""
    sources: tuple[Placement, ...]
    of_state: tuple[int, ...]
    """Per state of the producer, an index into ``sources``."""
    bits: Mapping[Placement, int]
    """Bit of each placement that is wanted."""
    leaving: int
    """Bits of the placements in which it leaves."""
    readers: tuple[int, ...]
    """Nodes that read it, each once."""
    wants: tuple[Masks, ...]
    """Per reader and candidate."""
    move_us: Costs
    """Per source and wanted placement, tie-break included."""
    copies: Flags
    """Whether the move makes a new tensor."""


@dataclass(slots=True, kw_only=True)
class _Builder:
    """The network while it is being built."""

    problem: Problem
    sizes: list[int]
    relaxed: bool
    moves: list[Table] = field(default_factory=list)
    kept_bytes: list[Table] = field(default_factory=list)
    shared: list[Shared] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    """Result of a view to the variable that says whether its memory must stay."""

    def variable(self, size: int) -> int:
        """A new variable."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def node(self, number: int) -> NodeProblem:
        """The node of that number, which is its variable too."""
        return self.problem.nodes[number]


def build_network(problem: Problem, facts: Iterable[ValueFacts], *, relaxed: bool = False) -> Network:
    """State a problem as tables, without what is kept for backward: for an activation price of 0."""
    params = _params(problem)
    sizes = [*(len(n.candidates) for n in problem.nodes), *(len(v.sources) for v in params)]
    builder = _Builder(problem=problem, sizes=sizes, relaxed=relaxed)
    for fact in facts:
        if fact.bits:
            _add_moves(builder, fact)
    return _network(builder)


def with_memory(network: Network, facts: Iterable[ValueFacts]) -> Network:
    """The network with what is kept for backward: for an activation price above 0."""
    builder = _Builder(
        problem=network.problem,
        sizes=list(network.plan.sizes),
        relaxed=network.relaxed,
        moves=list(network.moves),
        shared=list(network.shared),
    )
    for fact in facts:
        _add_kept(builder, fact)
    return _network(builder)


def _network(builder: _Builder) -> Network:
    params = _params(builder.problem)
    scopes = [scope for scope, _ in (*builder.moves, *builder.kept_bytes)]
    choices = range(len(builder.problem.nodes) + len(params))
    return Network(
        problem=builder.problem,
        params=tuple(v.name for v in params),
        moves=tuple(builder.moves),
        kept_bytes=tuple(builder.kept_bytes),
        relaxed=builder.relaxed,
        plan=plan_elimination(builder.sizes, [*scopes, *((v,) for v in choices)]),
        shared=tuple(builder.shared),
    )


def tables_at(network: Network, prices: Prices, fixed: Mapping[str, Placement]) -> list[Costs]:
    """All tables at these prices; ``fixed`` pins parameters to one of their sources."""
    problem, values = network.problem, {v.name: v for v in network.problem.values}
    price = prices.activation_us_per_byte
    moves = [costs for _, costs in network.moves]
    whole = np.floor if network.relaxed else np.rint
    kept = [whole(num_bytes * (price * UNITS_PER_US)) for _, num_bytes in network.kept_bytes]
    nodes = [_units(np.array([c.total_us + price * c.extra_bytes for c in n.candidates])) for n in problem.nodes]
    params = [_param_costs(problem, values[name], prices, fixed.get(name)) for name in network.params]
    return [*moves, *kept, *nodes, *params]


def choice_of(network: Network, found: Minimum) -> Choice:
    """The choice that states of the variables stand for."""
    count = len(network.problem.nodes)
    sources = {v.name: v.sources for v in network.problem.values if v.origin == "param"}
    states = zip(network.params, found.states[count:], strict=False)
    return Choice(candidates=found.states[:count], params=tuple((name, sources[name][state]) for name, state in states))


def _param_costs(problem: Problem, value: ValueProblem, prices: Prices, pinned: Placement | None) -> Costs:
    assert pinned is None or pinned in value.sources, (
        f"{value.name} cannot live in {pinned}; it can in {', '.join(map(str, value.sources))}"
    )
    held = (local_bytes(value.meta, source, problem.degree) for source in value.sources)
    costs = [
        prices.step * sync + prices.state_us_per_byte * num_bytes
        for sync, num_bytes in zip(value.sync_us, held, strict=True)
    ]
    return np.where([pinned in (None, source) for source in value.sources], _units(np.array(costs)), np.inf)


def _units(costs_us: Costs) -> Costs:
    return np.rint(costs_us * UNITS_PER_US)


def _params(problem: Problem) -> list[ValueProblem]:
    return [v for v in problem.values if v.origin == "param"]


def value_facts(problem: Problem) -> tuple[ValueFacts, ...]:
    """Facts of every value, the last one made first: views come before what they are views of."""
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(problem.nodes):
        for name in dict.fromkeys(node.operands):
            readers.setdefault(name, []).append(number)
    values = {v.name: v for v in problem.values}
    found = [
        _facts(problem, values[name], (number,), _outputs(node, position), readers.get(name, ()))
        for number, node in reversed(list(enumerate(problem.nodes)))
        for position, name in enumerate(node.results)
    ]
    for i, value in enumerate(_params(problem)):
        found.append(_facts(problem, value, (len(problem.nodes) + i,), value.sources, readers.get(value.name, ())))
    arriving = (v for v in problem.values if v.origin in ("input", "given"))
    return (*found, *(_facts(problem, v, (), v.sources[:1], readers.get(v.name, ())) for v in arriving))


def _outputs(node: NodeProblem, position: int) -> tuple[Placement, ...]:
    return tuple(c.strategy.outputs[position] for c in node.candidates)


def _facts(
    problem: Problem, value: ValueProblem, producer: Scope, made: tuple[Placement, ...], readers: Sequence[int]
) -> ValueFacts:
    """``made`` is the placement of the value per state of its producer."""
    name, sources = value.name, tuple(dict.fromkeys(made))
    wanted = [_wanted(problem.nodes[number], name) for number in readers]
    leaving = [dst for output, dst in problem.outputs if output == name and dst is not None]
    places = dict.fromkeys(place for reader in wanted for candidate in reader for place in candidate)
    bits = {place: 1 << i for i, place in enumerate(places | dict.fromkeys(leaving))}
    grid = problem.moves.grid(name, sources, tuple(bits))
    return ValueFacts(
        value=value,
        producer=producer,
        sources=sources,
        of_state=tuple(map(sources.index, made)),
        bits=bits,
        leaving=sum(bits[dst] for dst in leaving),
        readers=tuple(readers),
        wants=tuple(_masks(bits, reader) for reader in wanted),
        move_us=grid.total_us + TIE_BREAK_US * grid.differ,
        copies=grid.copies,
    )


def _wanted(node: NodeProblem, name: str) -> list[dict[Placement, None]]:
    """Per candidate, the placements in which the node reads a value."""
    positions = [i for i, operand in enumerate(node.operands) if operand == name]
    return [dict.fromkeys(c.strategy.inputs[i] for i in positions) for c in node.candidates]


def _masks(bits: Mapping[Placement, int], sets: Iterable[Iterable[Placement]]) -> Masks:
    return np.array([sum(bits[place] for place in places) for places in sets], dtype=np.int64)


def _add_moves(builder: _Builder, fact: ValueFacts) -> None:
    """Time of the moves of one value: each placement that somebody wants is paid once."""
    moves = _units(fact.move_us)
    leaving = _Masks(scope=(), masks=np.array(fact.leaving))
    readers = [
        _Masks(scope=(number,), masks=masks & ~fact.leaving)
        for number, masks in zip(fact.readers, fact.wants, strict=True)
    ]
    some = [part for part in readers if part.masks.any()]
    if builder.relaxed and len(some) > _MOST_READERS:
        _share_moves(builder, fact, some, moves)
        some = []
    for part in (leaving, *(part for part, _ in _meet(builder, some))):
        costs = _members(part.masks, len(fact.bits)) @ moves.T
        _add(builder, builder.moves, (*part.scope, *fact.producer), costs[..., fact.of_state])


def _share_moves(builder: _Builder, fact: ValueFacts, readers: Sequence[_Masks], moves: Costs) -> None:
    """Each reader pays an equal share for now."""
    shared = Shared(
        tables=tuple(range(len(builder.moves), len(builder.moves) + len(readers))),
        readers=tuple(part.scope[0] for part in readers),
        wants=tuple(_members(part.masks, len(fact.bits)) for part in readers),
        producer=fact.producer,
        of_state=fact.of_state,
        moves=moves,
    )
    builder.shared.append(shared)
    for part, costs in zip(readers, shared.costs(shared.equal()), strict=True):
        builder.moves.append(_squeezed(builder, (*part.scope, *fact.producer), costs))


def _holds(builder: _Builder, number: int, fact: ValueFacts) -> _Masks:
    """What a reader keeps for backward. A view whose result must stay keeps the operand that it is a view of."""
    node, name = builder.node(number), fact.value.name
    masks = _masks(fact.bits, ({place for saved, place in c.saved if saved == name} for c in node.candidates))
    kept = [builder.kept[result] for result in node.results if result in builder.kept]
    if not kept or node.operands[0] != name:
        return _Masks(scope=(number,), masks=masks)
    base = _masks(fact.bits, ((c.strategy.inputs[0],) for c in node.candidates))
    stays = functools.reduce(np.bitwise_or.outer, [np.array([0, -1])] * len(kept))
    return _Masks(
        scope=(number, *kept),
        masks=np.bitwise_or.outer(masks, np.zeros_like(stays)) | np.bitwise_and.outer(base, stays),
    )


def _meet(builder: _Builder, parts: Iterable[_Masks]) -> list[tuple[_Masks, float]]:
    """Sets whose costs add up to that of the union of several sets; with the share of its cost that each pays."""
    some = [part for part in parts if part.masks.any()]
    if len(some) <= _MOST_READERS:
        return [(_union(some), 1.0)] if some else []
    if builder.relaxed:
        return [(part, 1.0 / len(some)) for part in some]
    return [(_hub(builder, some), 1.0)]


def _hub(builder: _Builder, parts: list[_Masks]) -> _Masks:
    """A new variable: the union of several sets."""
    states = [0]
    for part in parts:
        mine = dict.fromkeys(part.masks.ravel().tolist())
        states = list(dict.fromkeys(old | new for old in states for new in mine))
    hub = _Masks(scope=(builder.variable(len(states)),), masks=np.array(states))
    for part in parts:
        lacks = np.bitwise_and.outer(part.masks, ~hub.masks) != 0
        _add(builder, builder.moves, (*part.scope, *hub.scope), np.where(lacks, np.inf, 0.0))
    return hub


def _union(parts: Sequence[_Masks]) -> _Masks:
    masks = functools.reduce(np.bitwise_or.outer, (part.masks for part in parts), np.array(0))
    return _Masks(scope=tuple(v for part in parts for v in part.scope), masks=masks)


def _members(masks: Masks, count: int) -> Costs:
    """Masks as vectors of 0 and 1, along a new last axis."""
    return ((masks[..., None] >> np.arange(count)) & 1).astype(np.float64)


def _add_kept(builder: _Builder, fact: ValueFacts) -> None:
    """Memory of one value: each moved copy that is held, and the value as it was made if it is held as such.

    What a view holds as it was made is handed on: its variable in ``kept`` says so to its operand.
    """
    held = _meet(builder, [_holds(builder, number, fact) for number in fact.readers])
    saved = _saved_by_producer(builder, fact)
    members = [_members(part.masks, len(fact.bits)) for part, _ in held]
    stays = [(each @ ~fact.copies.T > 0)[..., fact.of_state] for each in members]
    own = _own_bytes(builder, fact)
    if _is_view(builder, fact) and (saved.any() or any(each.any() for each in stays)):
        builder.kept[fact.value.name] = builder.variable(2)
    fresh = fact.copies * _bytes(builder, fact, fact.bits)
    _add_held(builder, fact, (), saved, saved * own)
    for (part, share), each, stay in zip(held, members, stays, strict=True):
        copied = (each @ fresh.T)[..., fact.of_state]
        _add_held(builder, fact, part.scope, stay, share * (copied + (stay & ~saved) * own))


def _add_held(builder: _Builder, fact: ValueFacts, scope: Scope, stays: Flags, costs: Costs) -> None:
    scope = (*scope, *fact.producer)
    kept = builder.kept.get(fact.value.name)
    if kept is not None:
        scope, costs = (*scope, kept), np.stack([np.where(stays, np.inf, costs), costs], axis=-1)
    _add(builder, builder.kept_bytes, scope, costs)


def _bytes(builder: _Builder, fact: ValueFacts, places: Iterable[Placement]) -> Costs:
    degree = builder.problem.degree
    return np.array([local_bytes(fact.value.meta, place, degree) for place in places], dtype=np.float64)


def _own_bytes(builder: _Builder, fact: ValueFacts) -> Costs:
    """Per state of the producer, bytes of the value as it is made; 0 for what has no memory of its own."""
    if _is_view(builder, fact) or fact.value.origin not in ("node", "input"):
        return np.zeros(len(fact.of_state))
    return _bytes(builder, fact, fact.sources)[list(fact.of_state)]


def _is_view(builder: _Builder, fact: ValueFacts) -> bool:
    return fact.value.origin == "node" and builder.node(fact.producer[0]).is_view


def _saved_by_producer(builder: _Builder, fact: ValueFacts) -> Flags:
    if fact.value.origin != "node":
        return np.zeros(len(fact.of_state), dtype=np.bool_)
    name = fact.value.name
    return np.array([any(saved == name for saved, _ in c.saved) for c in builder.node(fact.producer[0]).candidates])


def _add(builder: _Builder, tables: list[Table], scope: Scope, costs: Costs) -> None:
    """One more table, unless it says nothing."""
    if costs.any():
        tables.append(_squeezed(builder, scope, costs))


def _squeezed(builder: _Builder, scope: Scope, costs: Costs) -> Table:
    """A table without its axes of a single state."""
    wide = tuple(v for v in scope if builder.sizes[v] > 1)
    if wide:
        return wide, costs.reshape(tuple(builder.sizes[v] for v in wide))
    return (0,), np.full(builder.sizes[0], costs.item())
