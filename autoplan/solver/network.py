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

from autoplan.sharding import Placement
from autoplan.solver.choice import TIE_BREAK_US, Choice
from autoplan.solver.eliminate import Costs, Elimination, Minimum, Scope, plan_elimination
from autoplan.solver.problem import MoveGrid, NodeProblem, Prices, Problem, ValueProblem, local_bytes
from autoplan.solver.shape import (
    HUB,
    MOST_READERS,
    Flags,
    Places,
    Reader,
    SetsOf,
    ValueShape,
    Wanted,
    hub_masks,
    lacking,
    make_shape,
    masks_of,
    members_of,
    union_of,
)
from autoplan.solver.shares import Shared

UNITS_PER_US = 1e6
"""Costs are counted in whole millionths of a microsecond."""

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
class ValueFacts:
    """What the tables of one value are made from."""

    value: ValueProblem
    shape: ValueShape
    grid: MoveGrid
    """From its sources to what is wanted."""


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
    saved: tuple[frozenset[str], ...] = ()
    """Per node, the values that some candidate keeps."""

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
        if fact.shape.bits:
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
        saved=tuple(frozenset(name for c in n.candidates for name, _ in c.saved) for n in network.problem.nodes),
    )
    for fact in facts:
        _add_kept(builder, fact)
    return _network(builder)


def _network(builder: _Builder) -> Network:
    params = _params(builder.problem)
    choices = range(len(builder.problem.nodes) + len(params))
    scopes = (*(scope for scope, _ in (*builder.moves, *builder.kept_bytes)), *((v,) for v in choices))
    sizes, plans = tuple(builder.sizes), builder.problem.moves.axis.plans
    if (sizes, scopes) not in plans:
        plans[sizes, scopes] = plan_elimination(sizes, scopes)
    return Network(
        problem=builder.problem,
        params=tuple(v.name for v in params),
        moves=tuple(builder.moves),
        kept_bytes=tuple(builder.kept_bytes),
        relaxed=builder.relaxed,
        plan=plans[sizes, scopes],
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
    readers: dict[str, list[Reader]] = {}
    for number, node in enumerate(problem.nodes):
        for name in dict.fromkeys(node.operands):
            readers.setdefault(name, []).append((number, _wanted(node, name)))
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


def _outputs(node: NodeProblem, position: int) -> Places:
    return tuple([c.strategy.outputs[position] for c in node.candidates])


def _wanted(node: NodeProblem, name: str) -> tuple[Places, ...]:
    """For each position at which a node reads a value, the placement that each candidate wants."""
    positions = [i for i, operand in enumerate(node.operands) if operand == name]
    return tuple([tuple([c.strategy.inputs[i] for c in node.candidates]) for i in positions])


def _facts(
    problem: Problem, value: ValueProblem, producer: Scope, made: Places, readers: Sequence[Reader]
) -> ValueFacts:
    """``made`` is the placement of the value per state of its producer."""
    leaving = tuple(dst for output, dst in problem.outputs if output == value.name and dst is not None)
    key, shapes = (producer, made, tuple(readers), leaving), problem.moves.axis.shapes
    if key not in shapes:
        shapes[key] = make_shape(len(shapes), producer, made, readers, leaving)
    shape = shapes[key]
    grid = problem.moves.grid(value.name, shape.sources, tuple(shape.bits))
    return ValueFacts(value=value, shape=shape, grid=grid)


def _add_moves(builder: _Builder, fact: ValueFacts) -> None:
    """Time of the moves of one value: each placement that somebody wants is paid once."""
    shape, parts = fact.shape, fact.shape.move_parts(builder.relaxed)
    moves = _units(fact.grid.total_us + TIE_BREAK_US * fact.grid.differ)
    hub = builder.variable(parts.hub_states) if parts.hub_states else HUB
    for scope, costs in parts.lacks:
        _add(builder, builder.moves, _with_hub(scope, hub), costs)
    for part in parts.wanted:
        costs = (part.members @ moves.T)[..., shape.of_state]
        _add(builder, builder.moves, (*_with_hub(part.scope, hub), *shape.producer), costs)
    if parts.shared:
        _share_moves(builder, shape, parts.shared, moves)


def _with_hub(scope: Scope, hub: int) -> Scope:
    return tuple(hub if v == HUB else v for v in scope)


def _share_moves(builder: _Builder, shape: ValueShape, readers: Sequence[Wanted], moves: Costs) -> None:
    """Each reader pays an equal share for now."""
    shared = Shared(
        tables=tuple(range(len(builder.moves), len(builder.moves) + len(readers))),
        readers=tuple(part.scope[0] for part in readers),
        wants=tuple(part.members for part in readers),
        producer=shape.producer,
        of_state=shape.of_state,
        moves=moves,
    )
    builder.shared.append(shared)
    for part, costs in zip(readers, shared.costs(shared.equal()), strict=True):
        builder.moves.append(_squeezed(builder, (*part.scope, *shape.producer), costs))


def _holds(builder: _Builder, number: int, fact: ValueFacts) -> SetsOf | None:
    """What a reader keeps for backward. A view whose result must stay keeps the operand that it is a view of."""
    node, name, bits = builder.node(number), fact.value.name, fact.shape.bits
    kept = [builder.kept[result] for result in node.results if result in builder.kept]
    hands_on = kept and node.operands[0] == name
    if not hands_on and name not in builder.saved[number]:
        return None
    masks = masks_of(bits, ([place for saved, place in c.saved if saved == name] for c in node.candidates))
    if not hands_on:
        return SetsOf(scope=(number,), masks=masks)
    base = masks_of(bits, ((c.strategy.inputs[0],) for c in node.candidates))
    stays = functools.reduce(np.bitwise_or.outer, [np.array([0, -1])] * len(kept))
    return SetsOf(
        scope=(number, *kept),
        masks=np.bitwise_or.outer(masks, np.zeros_like(stays)) | np.bitwise_and.outer(base, stays),
    )


def _meet(builder: _Builder, parts: Iterable[SetsOf | None]) -> list[tuple[SetsOf, float]]:
    """Sets whose costs add up to that of the union of several sets; with the share of its cost that each pays."""
    some = [part for part in parts if part is not None and part.masks.any()]
    if len(some) <= MOST_READERS:
        return [(union_of(some), 1.0)] if some else []
    if builder.relaxed:
        return [(part, 1.0 / len(some)) for part in some]
    hub = SetsOf(scope=(len(builder.sizes),), masks=hub_masks(some))
    builder.variable(len(hub.masks))
    for scope, costs in lacking(some, hub.masks, hub.scope[0]):
        _add(builder, builder.moves, scope, costs)
    return [(hub, 1.0)]


def _add_kept(builder: _Builder, fact: ValueFacts) -> None:
    """Memory of one value: each moved copy that is held, and the value as it was made if it is held as such.

    What a view holds as it was made is handed on: its variable in ``kept`` says so to its operand.
    """
    shape, grid = fact.shape, fact.grid
    held = _meet(builder, [_holds(builder, number, fact) for number in shape.readers])
    saved = _saved_by_producer(builder, fact)
    if not held and not saved.any():
        return
    members = [members_of(part.masks, len(shape.bits)) for part, _ in held]
    stays = [(each @ ~grid.copies.T > 0)[..., shape.of_state] for each in members]
    own = _own_bytes(builder, fact)
    if _is_view(builder, fact) and (saved.any() or any(each.any() for each in stays)):
        builder.kept[fact.value.name] = builder.variable(2)
    fresh = grid.copies * grid.wanted_bytes
    _add_held(builder, fact, (), saved, saved * own)
    for (part, share), each, stay in zip(held, members, stays, strict=True):
        copied = (each @ fresh.T)[..., shape.of_state]
        _add_held(builder, fact, part.scope, stay, share * (copied + (stay & ~saved) * own))


def _add_held(builder: _Builder, fact: ValueFacts, scope: Scope, stays: Flags, costs: Costs) -> None:
    scope = (*scope, *fact.shape.producer)
    kept = builder.kept.get(fact.value.name)
    if kept is not None:
        scope, costs = (*scope, kept), np.stack([np.where(stays, np.inf, costs), costs], axis=-1)
    _add(builder, builder.kept_bytes, scope, costs)


def _own_bytes(builder: _Builder, fact: ValueFacts) -> Costs:
    """Per state of the producer, bytes of the value as it is made; 0 for what has no memory of its own."""
    if _is_view(builder, fact) or fact.value.origin not in ("node", "input"):
        return np.zeros(len(fact.shape.of_state))
    return fact.grid.source_bytes[list(fact.shape.of_state)]


def _is_view(builder: _Builder, fact: ValueFacts) -> bool:
    return fact.value.origin == "node" and builder.node(fact.shape.producer[0]).is_view


def _saved_by_producer(builder: _Builder, fact: ValueFacts) -> Flags:
    shape, name = fact.shape, fact.value.name
    if fact.value.origin != "node" or name not in builder.saved[shape.producer[0]]:
        return np.zeros(len(shape.of_state), dtype=np.bool_)
    return np.array([any(saved == name for saved, _ in c.saved) for c in builder.node(shape.producer[0]).candidates])


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
