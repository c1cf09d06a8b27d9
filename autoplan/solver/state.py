"""State of one search: the best steps so far, what happened to everything else, and what is still open."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from autoplan.errors import InputError
from autoplan.plan.plan import MESH_AXES, SearchStatus
from autoplan.solver.bounds import Way
from autoplan.solver.mesh import Degrees, Point
from autoplan.solver.points import Family, Holding, Space, holdings, point_of, schedules
from autoplan.solver.request import Request
from autoplan.solver.step import PricedRuns, RunParams, Step
from autoplan.solver.tables import TableKey, Tables

Progress = Callable[[str], None]
INFINITE = float("inf")
NO_CUT = "no cut into stages fits the memory"


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
    way: Way | None = None
    """Schedule and chunks."""
    holding: Holding | None = None

    def holds(self, other: "Node") -> bool:
        """Whether the other is this part of the space, or a part of it."""
        mine, its = (self.key, self.way, self.holding), (other.key, other.way, other.holding)
        return self.family == other.family and all(a in (None, b) for a, b in zip(mine, its, strict=True))

    @property
    def point(self) -> Point | None:
        """The candidate, where everything is decided."""
        if self.way is None or self.holding is None:
            return None
        return point_of(self.family, self.holding, *self.way)


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
    nodes: dict[int, Node] = field(default_factory=dict)
    """By identity of a step: the node it solves."""
    polishing: bool = False
    """Whether the search goes on below the gap, because what was solved is not proven well enough."""
    num_boundaries: int = 0
    """Boundaries opened so far."""
    probed: set[Node] = field(default_factory=set)
    """Points solved ahead of their turn."""
    num_solved: int = 0
    num_bounded: int = 0
    known: dict[TableKey, tuple[float, ...]] = field(default_factory=dict)
    """Each class at its fastest, of the tables made so far."""
    bounds: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Bounds of schedules by the tables of their families, equal for many orders of the axes."""
    least: dict[tuple[object, ...], float] = field(default_factory=dict)
    """Bounds of families before their tables are made, likewise."""
    flying: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """By stages and microbatches: what every rank has in flight at least."""
    priced: dict[tuple[Family, TableKey, Holding], PricedRuns] = field(default_factory=dict)
    run_params: dict[int, RunParams] = field(default_factory=dict)
    """By stages: one, or two for more."""
    crossing: dict[int, int] = field(default_factory=dict)
    """Bytes that cross between stages on one device, by microbatch."""
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
        share = self.request.gap / 4 if self.polishing else self.request.gap
        return self.kept[-1].total_us * (1 - share) if full else float("inf")

    @property
    def is_proven(self) -> bool:
        """Whether what was solved, and what is open, bounds the best plan within the gap that was asked for."""
        best = self.best
        opened = self.open[0][0] if self.open else float("inf")
        return best is None or min(self.bound_us, opened) >= best.total_us * (1 - self.request.gap)

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


def leaves(state: Search, node: Node) -> int:
    """Candidates under an open node."""
    ways = 1 if node.way is not None else sum(1 for _ in schedules(state.space, node.family))
    held = 1 if node.holding is not None else sum(1 for _ in holdings(state.space, node.family))
    boundaries = 1 if node.key is not None or node.family.degrees.tp == 1 else 2
    return boundaries * ways * held


def points_under(state: Search, node: Node) -> Iterator[Point]:
    """Every candidate under a node."""
    held = [node.holding] if node.holding is not None else list(holdings(state.space, node.family))
    ways = [node.way] if node.way is not None else list(schedules(state.space, node.family))
    for holding in held:
        for way in ways:
            yield point_of(node.family, holding, *way)


def close(state: Search) -> None:
    """Count what stayed open, and let the least of its bounds join the proof."""
    if state.idle is not None and not state.kept:
        state.solved.append(state.idle)
        state.bound_us = min(state.bound_us, state.idle.total_us)
    named: set[Degrees] = set()
    for bound, _, node in sorted(state.open, key=lambda entry: entry[:2]):
        state.bound_us = min(state.bound_us, bound)
        state.num_bounded += leaves(state, node) - sum(node.holds(probed) for probed in state.probed)
        degrees = replace(node.family.degrees, order=MESH_AXES)
        point = None if degrees in named else next(points_under(state, node), None)
        if point is not None:
            named.add(degrees)
            state.note(Loss(point=point, step_us=bound, is_bound=True))
    state.open.clear()
    if state.best is not None:
        state.bound_us = min(state.bound_us, state.best.total_us)
