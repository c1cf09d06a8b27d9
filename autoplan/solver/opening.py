"""What becomes of a node when it is opened: nodes below it with higher bounds, or a refusal."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from autoplan.cost import Collective
from autoplan.plan.plan import MESH_AXES
from autoplan.sharding import CollectiveKind
from autoplan.solver.bounds import (
    Way,
    family_bound_us,
    family_memory_us,
    fastest_us,
    implied_us,
    least_state_bytes,
    rough_rows,
    schedule_chain,
    split_rows,
)
from autoplan.solver.chain import ChainProblem, fastest_bound_us
from autoplan.solver.dual import lower_bound_us
from autoplan.solver.mesh import Point, groups_of
from autoplan.solver.places import flying_of
from autoplan.solver.points import Family, Holding, families, holdings, point_of, schedules
from autoplan.solver.pricing import cut_bytes, setting_at
from autoplan.solver.setting import Setting
from autoplan.solver.state import INFINITE, NO_CUT, Node, Search, leaves, points_under
from autoplan.solver.step import PricedRuns, chain_of, price_runs, run_params
from autoplan.solver.tables import Table, TableKey

_HIGHER = 1 + 1e-9
"""A bound that exceeds the one before by less is as good as the same."""
_NOTHING_HELD = Holding(data="replicate", shards=1, expert=1, offload=False)


def open_families(state: Search) -> None:
    """All families, bounded by compute alone."""
    for family in families(state.space):
        state.sizes.add(family.microbatch)
        ranks = family.degrees.tp * family.degrees.cp
        least = [time / ranks for time in fastest_us(_whole(state, family))]
        state.push(family_bound_us(state.space.class_counts, least, family), Node(family=family))


def _whole(state: Search, family: Family) -> Table:
    """The table of one device at the family's microbatch."""
    return state.tables.table(TableKey(tp=1, microbatch=family.microbatch, sequence=False))


def _key(state: Search, family: Family, sequence: bool) -> TableKey:
    group = family.degrees.mesh.group("cp", state.space.cluster.devices_per_node)
    return TableKey(
        tp=family.degrees.tp,
        cp=family.degrees.cp,
        cp_per_node=group.per_node,
        microbatch=family.microbatch,
        sequence=sequence,
    )


def open_family(state: Search, node: Node, bound: float) -> None:
    """Bound a family by its memory; then split it by its boundary, with what other tables imply for both."""
    family = node.family
    alone = fastest_us(_whole(state, family))
    ranks = family.degrees.tp * family.degrees.cp
    tight = _split_bound(state, family, None, tuple(time / ranks for time in alone))
    if tight > bound * _HIGHER:
        _again(state, node, tight)
        return
    for sequence in (True, False) if family.degrees.tp > 1 else (False,):
        key = _key(state, family, sequence)
        _seed(state, key)
        least = state.known.get(key) or implied_us(state.known, key, alone)
        _again(state, Node(family=family, key=key), max(bound, _split_bound(state, family, key, least)))


def _again(state: Search, node: Node, bound: float) -> None:
    """Open it later; refuse it when no bound is finite."""
    if bound < INFINITE:
        state.push(bound, node)
        return
    point = next(points_under(state, node), None)
    if point is not None:
        state.refuse(point, NO_CUT, leaves(state, node))


def _split_bound(state: Search, family: Family, key: TableKey | None, least: tuple[float, ...]) -> float:
    """Bound by memory, when every class takes at least so long and splits evenly."""
    found = (_like(state, family), key)
    if found not in state.least:
        ways = tuple(schedules(state.space, family))
        flying = _flying(state, family, ways)
        rows = split_rows(_whole(state, family), family.degrees.tp * family.degrees.cp, least)
        send = _send_us(state, family, family.degrees.tp if key is None or key.sequence else 1)
        state.least[found] = family_memory_us(state.space, family, rows, ways, flying, send) if ways else INFINITE
    return state.least[found]


def _flying(state: Search, family: Family, ways: tuple[Way, ...]) -> tuple[int, ...]:
    """Microbatches that every stage of a rank holds at some moment, by the schedule that holds least."""
    pp, m = family.degrees.pp, family.num_microbatches
    if (pp, m) not in state.flying:
        found = [
            [max(map(min, moments)) for moments in flying_of(schedule, pp, chunks, m)] for schedule, chunks in ways
        ]
        state.flying[pp, m] = tuple(map(min, zip(*found, strict=True)))
    return state.flying[pp, m]


def _like(state: Search, family: Family) -> tuple[object, ...]:
    """What the bounds of a family depend on: not the order of its axes, but who neighbours are."""
    point = point_of(family, _NOTHING_HELD, "1f1b", 1)
    canonical = replace(family, degrees=replace(family.degrees, order=MESH_AXES))
    return canonical, groups_of(point, state.space.cluster).neighbours.per_node


def _send_us(state: Search, family: Family, tensor_split: int) -> float:
    """Time of sending what crosses between stages, at least, when it is split evenly."""
    if family.degrees.pp == 1:
        return 0.0
    if family.microbatch not in state.crossing:
        cuts = cut_bytes(state.tables.model(family.microbatch), 1, False)
        state.crossing[family.microbatch] = max(map(sum, cuts))
    num_bytes = state.crossing[family.microbatch] // (tensor_split * family.degrees.cp)
    group = groups_of(point_of(family, _NOTHING_HELD, "1f1b", 1), state.space.cluster).neighbours
    if num_bytes == 0:
        return 0.0
    return state.tables.cost.collective_us(Collective(kind=CollectiveKind.SEND, num_bytes=num_bytes, group=group))


def _seed(state: Search, key: TableKey) -> None:
    """Tables of the largest microbatch, from which bounds of all others at the same degrees follow."""
    largest = max(size for size in state.sizes if size % key.microbatch == 0)
    _times(state, TableKey(tp=key.tp, microbatch=largest, sequence=key.sequence))
    if key.cp > 1:
        _times(state, replace(key, microbatch=largest))


def _times(state: Search, key: TableKey) -> tuple[float, ...]:
    """Each class at its fastest, the table made if need be."""
    if key not in state.known:
        state.known[key] = fastest_us(state.tables.table(key))
    return state.known[key]


def open_boundary(state: Search, node: Node, bound: float) -> None:
    """Make the table of a family and a boundary, and bound each schedule by it, memory left aside."""
    assert node.key is not None
    _times(state, node.key)
    for way in schedules(state.space, node.family):
        below = replace(node, way=way)
        _again(state, below, max(bound, _schedule_bound(state, below, fastest_bound_us)))
    state.num_boundaries += 1


def _schedule_bound(state: Search, node: Node, bound_us: Callable[[ChainProblem], float]) -> float:
    """A schedule bounded by its own table; the same for many orders of the axes."""
    family, key, way = node.family, node.key, node.way
    assert key is not None and way is not None
    found = _like(state, family), key, way, bound_us
    if found not in state.bounds:
        send = _send_us(state, family, family.degrees.tp if key.sequence else 1)
        chain = schedule_chain(state.space, family, rough_rows(state.tables.table(key)), way, send)
        state.bounds[found] = bound_us(chain)
    return state.bounds[found]


def probe_of(state: Search, node: Node) -> Node | None:
    """The most promising point under a boundary that was opened, to have a plan early; None where nothing fits."""
    ways = [replace(node, way=way) for way in schedules(state.space, node.family)]
    bounds = [(_schedule_bound(state, below, lower_bound_us), below.way) for below in ways]
    fitting = [(tight, way) for tight, way in bounds if tight < INFINITE]
    if not fitting:
        return None
    held = _holdings(state, replace(node, way=min(fitting)[1]), [])
    bounded = [(lower_bound_us(_chain_at(state, below)), below) for below in held]
    tight, best = min(bounded, key=lambda pair: pair[0], default=(INFINITE, None))
    return best if tight < INFINITE else None


def open_schedule(state: Search, node: Node, bound: float) -> None:
    """Bound every way to hold parameters under one schedule by its work alone."""
    refused: list[Point] = []
    for below in _holdings(state, node, refused):
        assert below.point is not None
        state.push(max(bound, _priced(state, below).spread_us(below.point)), below)
    for point in refused:
        state.refuse(point, "parameters, gradients and optimizer states alone exceed the memory")


def is_raised(state: Search, node: Node, bound: float, enough_us: float) -> bool:
    """Whether the memory raises the bound of a schedule or a point, which is then opened later, or refused."""
    if node.holding is not None:
        tight = lower_bound_us(_chain_at(state, node), enough_us=enough_us)
    else:
        tight = bound if node.way is None else _schedule_bound(state, node, lower_bound_us)
    if tight <= bound * _HIGHER:
        return False
    _again(state, node, tight)
    return True


def _holdings(state: Search, node: Node, refused: list[Point]) -> Iterator[Node]:
    """Every way to hold parameters under one schedule that may fit; ``refused`` collects the others."""
    assert node.way is not None
    for holding in holdings(state.space, node.family):
        point = point_of(node.family, holding, *node.way)
        if least_state_bytes(state.space.facts, point) > state.space.cluster.memory_bytes:
            refused.append(point)
        else:
            yield replace(node, holding=holding)


def _chain_at(state: Search, node: Node) -> ChainProblem:
    setting, priced = priced_at(state, node)
    return chain_of(setting, priced, state.request.cuts)


def priced_at(state: Search, node: Node) -> tuple[Setting, PricedRuns]:
    """The setting of a point, and its runs with prices."""
    return _setting(state, node), _priced(state, node)


def _setting(state: Search, node: Node) -> Setting:
    assert node.key is not None and node.point is not None
    return setting_at(state.tables, state.space.facts, node.point, state.tables.table(node.key))


def _priced(state: Search, node: Node) -> PricedRuns:
    """Runs with their prices; these are the same for every schedule."""
    assert node.key is not None and node.holding is not None and node.point is not None
    found = node.family, node.key, node.holding
    if found not in state.priced:
        several = min(node.point.num_stages, 2)
        if several not in state.run_params:
            state.run_params[several] = run_params(state.tables.sg, several)
        table = state.tables.table(node.key)
        state.priced[found] = price_runs(_setting(state, node), table, state.run_params[several])
    return state.priced[found]
