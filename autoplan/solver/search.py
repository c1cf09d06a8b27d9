"""Levels 0 to 2 together: best-first branch and bound over families, boundaries, holdings and schedules.

The node with the least lower bound is opened next. Opening a family makes its tables, opening a boundary prices its
holdings, opening a holding bounds its schedules, opening a point solves its stages. The search ends when no open node
can beat the worst plan that is kept, up to the gap that was asked for; the least bound of all that was left out or
solved is the proof.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autoplan.errors import InputError
from autoplan.plan.plan import MESH_AXES, SearchStatus
from autoplan.sharding import Shard
from autoplan.solver.bounds import (
    family_bound_us,
    fastest_us,
    implied_us,
    least_flying,
    least_state_bytes,
    memory_bound_us,
    rough_rows,
    split_rows,
)
from autoplan.solver.build import Model, crossing_placement, crossing_values
from autoplan.solver.chain import StageLimits
from autoplan.solver.dual import lower_bound_us
from autoplan.solver.mesh import Point
from autoplan.solver.milp import SolveState
from autoplan.solver.points import Family, Holding, Space, families, holdings, point_of, schedules
from autoplan.solver.problem import local_bytes
from autoplan.solver.request import Request
from autoplan.solver.setting import Facts, Setting, make_setting
from autoplan.solver.step import PricedRuns, Solved, Step, chain_of, price_runs, solve_step
from autoplan.solver.tables import Table, TableKey, Tables

Progress = Callable[[str], None]
INFINITE = float("inf")
NO_CUT = "no cut into stages fits the memory"
_EVERY_S = 2.0
_POINT_LIMIT_S = 20.0
"""One solve of stages; only met on a machine far slower than the limit in nodes foresees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a point is not the answer; ``step_us`` is its time, its lower bound when ``is_bound``, None if refused."""

    point: Point
    step_us: float | None
    is_bound: bool = False
    reason: str = ""
    step: Step | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A part of the space: a family, and as much below it as is decided."""

    family: Family
    key: TableKey | None = None
    holding: Holding | None = None
    point: Point | None = None
    setting: Setting | None = None
    priced: PricedRuns | None = None


@dataclass(slots=True, kw_only=True)
class Search:
    """State of one search: the best steps so far and what happened to everything else."""

    tables: Tables
    space: Space
    request: Request
    deadline: float
    progress: Progress
    kept: list[Step] = field(default_factory=list)
    """The best steps, fastest first; as many as were asked for."""
    solved: list[Step] = field(default_factory=list)
    """All steps found."""
    idle: Step | None = None
    """Best step whose tensor axis splits nothing: the answer only where there is no other."""
    losses: dict[tuple[int, ...], Loss] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    bound_us: float = INFINITE
    """Least lower bound of all that was solved or left out."""
    status: SearchStatus = "complete"
    num_solved: int = 0
    num_bounded: int = 0
    known: dict[TableKey, tuple[float, ...]] = field(default_factory=dict)
    """Each class at its fastest, of the tables made so far."""
    roughly: dict[tuple[Family, TableKey | None], float] = field(default_factory=dict)
    """Bounds of families by their memory, with and without what other tables imply."""
    tightly: dict[tuple[Family, TableKey], float] = field(default_factory=dict)
    """Bounds of families by their memory and their own tables."""
    flying: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """By stages and microbatches: what is in flight on each rank at least."""
    sizes: set[int] = field(default_factory=set)
    """Microbatches of the families."""
    open: list[tuple[float, int, Node]] = field(default_factory=list)
    serial: int = 0
    last_error: InputError | None = None
    said: float = 0.0

    @property
    def best(self) -> Step | None:
        """The fastest step found."""
        return self.kept[0] if self.kept else self.idle

    @property
    def cutoff_us(self) -> float:
        """Nothing at or above it is wanted."""
        full = len(self.kept) >= self.request.top
        return self.kept[-1].total_us * (1 - self.request.gap) if full else INFINITE

    def push(self, bound: float, node: Node) -> None:
        """Add an open node; equal bounds keep the order in which they came."""
        self.serial += 1
        heapq.heappush(self.open, (bound, self.serial, node))

    def note(self, loss: Loss) -> None:
        """Keep the best entry of each mesh: a solved one before a bound before a refusal."""
        degrees = loss.point.degrees
        key = (degrees.pp, degrees.dp, degrees.cp, degrees.tp)
        old = self.losses.get(key)
        if old is None or _rank(loss) < _rank(old):
            self.losses[key] = loss

    def refuse(self, point: Point, reason: str, count: int = 1) -> None:
        """Candidates that cannot be."""
        self.refusals[reason] += count
        self.note(Loss(point=point, step_us=None, reason=reason))


def _rank(loss: Loss) -> tuple[int, float]:
    if loss.step_us is None:
        return 2, 0.0
    return int(loss.is_bound), loss.step_us


def search(tables: Tables, space: Space, request: Request, progress: Progress) -> Search:
    """Find the best steps. Deterministic unless the time limit or an interrupt strikes; ``status`` says so.

    An interrupt before any plan is found is raised again.
    """
    start = time.monotonic()
    state = Search(
        tables=tables, space=space, request=request, progress=progress, deadline=start + request.time_limit_s, said=start
    )
    try:
        _open_families(state)
        _run(state)
    except KeyboardInterrupt:
        if state.best is None:
            raise
        state.status = "interrupted"
    if state.best is None and state.last_error is not None:
        raise state.last_error
    _close(state)
    return state


def _open_families(state: Search) -> None:
    counts = state.space.class_counts
    whole: dict[int, tuple[float, ...]] = {}
    for family in families(state.space):
        state.sizes.add(family.microbatch)
        if family.microbatch not in whole:
            whole[family.microbatch] = fastest_us(state.tables.table(_key(state, family, False, whole=True)))
        least = [time / (family.degrees.tp * family.degrees.cp) for time in whole[family.microbatch]]
        state.push(family_bound_us(counts, least, family), Node(family=family))


def _key(state: Search, family: Family, sequence: bool, *, whole: bool = False) -> TableKey:
    if whole:
        return TableKey(tp=1, microbatch=family.microbatch, sequence=False)
    group = family.degrees.mesh.group("cp", state.space.cluster.devices_per_node)
    return TableKey(
        tp=family.degrees.tp,
        cp=family.degrees.cp,
        cp_per_node=group.per_node,
        microbatch=family.microbatch,
        sequence=sequence,
    )


def _run(state: Search) -> None:
    while state.open and state.open[0][0] < state.cutoff_us:
        now = time.monotonic()
        if now > state.deadline and state.best is not None:
            state.status = "time limit"
            return
        _say(state, now)
        bound, _, node = heapq.heappop(state.open)
        try:
            _open(state, node, bound)
        except KeyboardInterrupt:
            state.push(bound, node)
            raise
        except InputError as error:
            _refuse_degree(state, node, error)


def _refuse_degree(state: Search, node: Node, error: InputError) -> None:
    """What is pinned cannot be at this tensor degree; an error only if no other degree is left."""
    if state.request.pins_tensor:
        raise error
    state.last_error = error
    point = next(_points(state, node), None)
    if point is not None:
        state.refuse(point, str(error), _leaves(state, node))


def _open(state: Search, node: Node, bound: float) -> None:
    if node.point is not None:
        _solve(state, node)
    elif node.holding is not None:
        _open_holding(state, node, bound)
    elif node.key is not None:
        _open_boundary(state, node, bound)
    else:
        _open_family(state, node, bound)


def _say(state: Search, now: float) -> None:
    if now - state.said < _EVERY_S:
        return
    state.said = now
    best = "nothing fits yet" if state.best is None else f"best {state.best.total_us / 1e3:.2f} ms"
    state.progress(f"searching: {state.num_solved} solved, {len(state.open)} open, {best}")


def _open_family(state: Search, node: Node, bound: float) -> None:
    """Bound a family by its memory; then split it by its boundary, with what other tables imply for both."""
    family = node.family
    whole = state.tables.table(_key(state, family, False, whole=True))
    alone = fastest_us(whole)
    ranks = family.degrees.tp * family.degrees.cp
    tight = _memory_us(state, family, None, tuple(time / ranks for time in alone))
    if tight == INFINITE:
        point = next(_points(state, node), None)
        if point is not None:
            state.refuse(point, NO_CUT, _leaves(state, node))
        return
    if tight > bound * (1 + 1e-9):
        state.push(tight, node)
        return
    for sequence in (True, False) if family.degrees.tp > 1 else (False,):
        key = _key(state, family, sequence)
        _seed(state, key)
        least = state.known.get(key) or implied_us(state.known, key, alone)
        state.push(max(bound, _memory_us(state, family, key, least)), Node(family=family, key=key))


def _memory_us(state: Search, family: Family, key: TableKey | None, least: tuple[float, ...]) -> float:
    """Bound of a family by its memory, from the least time of each class; equal for many orders of its axes."""
    same = replace(family, degrees=replace(family.degrees, order=MESH_AXES)), key
    if same not in state.roughly:
        whole = state.tables.table(_key(state, family, False, whole=True))
        rows = split_rows(whole, family.degrees.tp * family.degrees.cp, least)
        flying = _flying(state, family)
        state.roughly[same] = memory_bound_us(state.space, family, rows, flying, whole=False) if flying else INFINITE
    return state.roughly[same]


def _flying(state: Search, family: Family) -> tuple[int, ...]:
    """Microbatches in flight on each rank by the schedule that holds least."""
    key = family.degrees.pp, family.num_microbatches
    if key not in state.flying:
        state.flying[key] = least_flying(state.space, family)
    return state.flying[key]


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


def _open_boundary(state: Search, node: Node, bound: float) -> None:
    assert node.key is not None
    _times(state, node.key)
    table = state.tables.table(node.key)
    tight = _table_us(state, node.family, table)
    if tight == INFINITE:
        state.refuse(next(_points(state, node)), NO_CUT, _leaves(state, node))
        return
    if tight > bound * (1 + 1e-9):
        state.push(tight, node)
        return
    ways = list(schedules(state.space, node.family))
    for holding in holdings(state.space, node.family) if ways else ():
        point = point_of(node.family, holding, *ways[0])
        least, limit = least_state_bytes(state.space.facts, point), state.space.cluster.memory_bytes
        if least > limit:
            state.refuse(point, "parameters, gradients and optimizer states alone exceed the memory", len(ways))
            continue
        setting = setting_at(state.tables, state.space.facts, point, table)
        priced = price_runs(setting, table)
        least_us = _without_bubble_us(state, setting, priced)
        if least_us == INFINITE:
            state.refuse(point, NO_CUT, len(ways))
            continue
        state.push(
            max(bound, least_us),
            Node(family=node.family, key=node.key, holding=holding, setting=setting, priced=priced),
        )


def _table_us(state: Search, family: Family, table: Table) -> float:
    """Bound of a family by its memory and its own table; equal for many orders of its axes."""
    same = replace(family, degrees=replace(family.degrees, order=MESH_AXES)), table.key
    if same not in state.tightly:
        state.tightly[same] = memory_bound_us(
            state.space, family, rough_rows(table), _flying(state, family), whole=True
        )
    return state.tightly[same]


def _without_bubble_us(state: Search, setting: Setting, priced: PricedRuns) -> float:
    """What every schedule takes at least: no bubble, nothing sent, as little in flight as any."""
    chain = chain_of(setting, priced, None)
    point = setting.point
    family = Family(
        degrees=point.degrees, microbatch=point.microbatch, num_microbatches=point.num_microbatches
    )
    flying = _flying(state, family)
    free = replace(
        chain,
        bubble_share=0.0,
        stages=(StageLimits(),) * point.pp,
        ranks=tuple((rank,) for rank in range(point.pp)),
        in_flight=tuple(((count,),) for count in flying),
    )
    return lower_bound_us(free)


def _open_holding(state: Search, node: Node, bound: float) -> None:
    assert node.holding is not None and node.key is not None and node.priced is not None
    table = state.tables.table(node.key)
    for schedule, chunks in schedules(state.space, node.family):
        point = point_of(node.family, node.holding, schedule, chunks)
        setting = setting_at(state.tables, state.space.facts, point, table)
        found = lower_bound_us(chain_of(setting, node.priced, state.request.cuts))
        if found == INFINITE:
            state.refuse(point, NO_CUT)
            continue
        state.push(
            max(bound, found),
            Node(
                family=node.family, key=node.key, holding=node.holding, point=point, setting=setting, priced=node.priced
            ),
        )


def _solve(state: Search, node: Node) -> None:
    assert node.point is not None and node.setting is not None and node.priced is not None
    cuts = state.request.cuts
    if cuts is not None and len(cuts) != node.point.num_stages - 1:
        state.refuse(node.point, f"{len(cuts)} pinned cuts make {len(cuts) + 1} stages")
        return
    state.num_solved += 1
    found = solve_step(
        node.setting,
        node.priced,
        gap=state.request.gap,
        cutoff_us=state.cutoff_us,
        cuts=cuts,
        time_limit_s=_POINT_LIMIT_S,
    )
    _take(state, node.point, found)


def _take(state: Search, point: Point, found: Solved) -> None:
    """File what became of a point."""
    step = found.step
    if step is None:
        if found.state is SolveState.BEATEN:
            state.bound_us = min(state.bound_us, found.bound_us)
            state.note(Loss(point=point, step_us=found.bound_us, is_bound=True))
        else:
            state.bound_us = min(state.bound_us, found.bound_us)
            state.refuse(point, _why(found.state))
        return
    if not splits_work(step) and not state.request.pins_tensor:
        state.refuse(point, "at this size the tensor axis would split nothing")
        if state.idle is None or step.total_us < state.idle.total_us:
            state.idle = step
        return
    state.bound_us = min(state.bound_us, found.bound_us)
    state.note(Loss(point=point, step_us=step.total_us, step=step))
    state.solved.append(step)
    before = state.best
    state.kept = sorted([*state.kept, step], key=lambda s: s.total_us)[: state.request.top]
    if state.best is not before:
        state.progress(f"{point}: {step.total_us / 1e3:.2f} ms per step")


def _why(state: SolveState) -> str:
    return NO_CUT if state is SolveState.INFEASIBLE else state.value


def splits_work(step: Step) -> bool:
    """Whether the tensor axis does anything: with tp > 1, some op is split over it."""
    if step.setting.point.tp == 1:
        return True
    options = {option.name: option for stage in step.stages for option in stage.options}
    strategies = [candidate.strategy for option in options.values() for _, candidate in option.resolved.nodes]
    return any(isinstance(p, Shard) for strategy in strategies for p in (*strategy.inputs, *strategy.outputs))


def _close(state: Search) -> None:
    """Count what stayed open, and let the least of its bounds join the proof."""
    if state.idle is not None and not state.kept:
        state.solved.append(state.idle)
        state.bound_us = min(state.bound_us, state.idle.total_us)
    for bound, _, node in sorted(state.open, key=lambda entry: entry[:2]):
        state.bound_us = min(state.bound_us, bound)
        state.num_bounded += _leaves(state, node)
        point = node.point or next(_points(state, node), None)
        if point is not None:
            state.note(Loss(point=point, step_us=bound, is_bound=True))
    state.open.clear()
    if state.best is not None:
        state.bound_us = min(state.bound_us, state.best.total_us)


def _leaves(state: Search, node: Node) -> int:
    """Candidates under an open node."""
    if node.point is not None:
        return 1
    ways = sum(1 for _ in schedules(state.space, node.family))
    if node.holding is not None:
        return ways
    boundaries = 1 if node.key is not None or node.family.degrees.tp == 1 else 2
    return boundaries * ways * sum(1 for _ in holdings(state.space, node.family))


def _points(state: Search, node: Node) -> Iterator[Point]:
    held = [node.holding] if node.holding is not None else holdings(state.space, node.family)
    for holding in held:
        for schedule, chunks in schedules(state.space, node.family):
            yield point_of(node.family, holding, schedule, chunks)


def setting_at(tables: Tables, facts: Facts, point: Point, table: Table) -> Setting:
    """What is fixed at one point."""
    _, model = tables.context(table.key)
    return make_setting(
        sg=tables.sg,
        cluster=tables.cluster,
        cost=tables.cost,
        point=point,
        facts=facts,
        prelude_bytes=_prelude_bytes(tables.model(point.microbatch)),
        cut_bytes=cut_bytes(model, point.tp, table.key.sequence),
        sequence=table.key.sequence,
    )


def _prelude_bytes(model: Model) -> int:
    """Bytes of what the segments read from the prelude."""
    made = {name for node in model.sg.prelude for name in model.nodes[node].results}
    read = {name for segment in model.sg.segments for name in segment.inputs}
    return sum(model.graph.metas[name].num_bytes for name in made & read)


def cut_bytes(model: Model, degree: int, sequence: bool) -> tuple[tuple[int, ...], ...]:
    """For each position of the chain: local bytes of every value made before it and read from it on."""
    sg = model.sg
    last_read = {name: i for i, segment in enumerate(sg.segments) for name in segment.inputs}
    crossing = crossing_values(sg)
    found: list[list[int]] = [[] for _ in range(len(sg.segments) + 1)]
    for name in (name for segment in sg.segments for name in segment.outputs if name in crossing):
        meta = model.graph.metas[name]
        place = crossing_placement(meta, degree, sequence)
        for position in range(model.made_in[name] + 1, last_read[name] + 1):
            found[position].append(local_bytes(meta, place, degree))
    return tuple(map(tuple, found))
