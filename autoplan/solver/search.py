"""Levels 0 to 2 together: best-first branch and bound over families, boundaries, schedules and holdings.

The node with the least lower bound is opened next. Opening a family bounds its schedules by memory and by what tables
of other families imply, opening a boundary makes its table, opening a schedule bounds each way to hold parameters,
opening a point solves its stages. The search ends when no open node can beat the worst plan that is kept, up to the gap
that was asked for; the least bound of all that was left out or solved is the proof.
"""

import heapq
import time

from autoplan.errors import InputError
from autoplan.sharding import Shard
from autoplan.solver.mesh import Point
from autoplan.solver.milp import SolveState
from autoplan.solver.opening import (
    is_raised,
    open_boundary,
    open_families,
    open_family,
    open_schedule,
    priced_at,
    probe_of,
)
from autoplan.solver.points import Space
from autoplan.solver.request import Request
from autoplan.solver.state import INFINITE, NO_CUT, Loss, Node, Progress, Search, close, leaves, points_under
from autoplan.solver.step import Solved, Step, solve_step
from autoplan.solver.tables import Tables

_EVERY_S = 2.0
_POLISHED = 100
"""Nodes to open for a better proof."""
_THOROUGH = 6
"""Solved points with loose bounds to solve again, at most."""
_POINT_LIMIT_S = 20.0
"""One solve of stages; only met on a machine far slower than the limit in nodes foresees."""


def search(tables: Tables, space: Space, request: Request, progress: Progress) -> Search:
    """Find the best steps. Deterministic unless the time limit or an interrupt strikes; ``status`` says so.

    An interrupt before any plan is found is raised again.
    """
    start = time.monotonic()
    state = Search(
        tables=tables,
        space=space,
        request=request,
        progress=progress,
        deadline=start + request.time_limit_s,
        said=start,
    )
    try:
        open_families(state)
        _run(state)
        _polish(state)
        _tighten(state)
    except KeyboardInterrupt:
        if state.best is None:
            raise
        state.status = "interrupted"
    if state.best is None and state.last_error is not None:
        raise state.last_error
    close(state)
    return state


def _polish(state: Search) -> None:
    """Where loose bounds of what was solved leave a gap, solve that thoroughly, then look a little further."""
    if state.status != "complete" or state.is_proven:
        return
    state.polishing = True
    done: set[Node] = set()
    for _ in range(_THOROUGH):
        loose = [(bound, node) for node, bound in state.proven.items() if node not in done]
        bound, node = min(loose, key=lambda pair: pair[0], default=(INFINITE, None))
        if node is None or bound >= state.proof_us:
            break
        assert node.point is not None
        done.add(node)
        _solve(state, node, node.point, thorough=True)
    if not state.is_proven:
        _run(state, most=_POLISHED)


def _tighten(state: Search) -> None:
    """Bound what is open next by its memory, for a closer proof; nothing more is solved."""
    for _ in range(_POLISHED):
        if state.best is None or not state.open or state.open[0][0] >= state.best.total_us:
            return
        bound, _, node = heapq.heappop(state.open)
        if node in state.probed:
            continue
        if not is_raised(state, node, bound, state.best.total_us):
            state.push(bound, node)
            return


def _run(state: Search, most: int | None = None) -> None:
    opened = 0
    while state.open and state.open[0][0] < state.cutoff_us and (most is None or opened < most):
        opened += 1
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


def _say(state: Search, now: float) -> None:
    if now - state.said < _EVERY_S:
        return
    state.said = now
    best = "nothing fits yet" if state.best is None else f"best {state.best.total_us / 1e3:.2f} ms"
    state.progress(f"searching: {state.num_solved} solved, {len(state.open)} open, {best}")


def _open(state: Search, node: Node, bound: float) -> None:
    if node in state.probed or is_raised(state, node, bound, state.cutoff_us):
        return
    if node.point is not None:
        _solve(state, node, node.point)
    elif node.way is not None:
        open_schedule(state, node, bound)
    elif node.key is not None:
        open_boundary(state, node, bound)
        if state.num_boundaries & (state.num_boundaries - 1) == 0:
            _probe(state, node)
    else:
        open_family(state, node, bound)


def _probe(state: Search, node: Node) -> None:
    """Solve the most promising point under a boundary ahead of its turn: a plan in hand leaves out much of the rest."""
    below = probe_of(state, node)
    if below is not None and below.point is not None and below not in state.probed:
        state.probed.add(below)
        _solve(state, below, below.point)


def _refuse_degree(state: Search, node: Node, error: InputError) -> None:
    """What is pinned cannot be at this tensor degree; an error only if no other degree is left."""
    if state.request.pins_tensor:
        raise error
    state.last_error = error
    point = next(points_under(state, node), None)
    if point is not None:
        state.refuse(point, str(error), leaves(state, node))


def _solve(state: Search, node: Node, point: Point, *, thorough: bool = False) -> None:
    cuts = state.request.cuts
    if cuts is not None and len(cuts) != point.num_stages - 1:
        state.refuse(point, f"{len(cuts)} pinned cuts make {len(cuts) + 1} stages")
        return
    setting, priced = priced_at(state, node)
    found = solve_step(
        setting,
        priced,
        gap=state.request.gap,
        cutoff_us=_thorough_cutoff(state, node) if thorough else state.cutoff_us,
        cuts=cuts,
        time_limit_s=_POINT_LIMIT_S,
        thorough=thorough,
    )
    filed = _file(state, node, point, found)
    state.num_solved += filed and not thorough


def _thorough_cutoff(state: Search, node: Node) -> float:
    """None for the best plan's own point; that others cannot beat it by more than the gap is enough."""
    return INFINITE if state.steps.get(node) is state.best else state.proof_us


def _file(state: Search, node: Node, point: Point, found: Solved) -> bool:
    """File what became of a point, solved for the first or the second time; False where it is refused."""
    step = found.step
    if step is None:
        state.proven[node] = max(found.bound_us, state.proven.get(node, 0.0))
        if found.state is not SolveState.BEATEN:
            state.refuse(point, _why(found.state))
            return False
        state.note(Loss(point=point, step_us=found.bound_us, is_bound=True))
        return True
    if not splits_work(step) and not state.request.pins_tensor:
        state.refuse(point, "at this size the tensor axis would split nothing")
        if state.idle is None or step.total_us < state.idle.total_us:
            state.idle = step
        return False
    state.proven[node] = max(found.bound_us, state.proven.get(node, 0.0))
    state.note(Loss(point=point, step_us=step.total_us, step=step))
    before, again = state.best, state.steps.get(node, step)
    state.steps[node] = min(again, step, key=_total)
    state.kept = sorted(state.steps.values(), key=_total)[: state.request.top]
    if state.best is not before:
        state.progress(f"{point}: {step.total_us / 1e3:.2f} ms per step")
    return True


def _total(step: Step) -> float:
    return step.total_us


def _why(state: SolveState) -> str:
    return NO_CUT if state is SolveState.INFEASIBLE else state.value


def splits_work(step: Step) -> bool:
    """Whether the tensor axis does anything: with tp > 1, some op is split over it."""
    if step.setting.point.tp == 1:
        return True
    options = {option.name: option for stage in step.stages for option in stage.options}
    strategies = [candidate.strategy for option in options.values() for _, candidate in option.resolved.nodes]
    return any(isinstance(p, Shard) for strategy in strategies for p in (*strategy.inputs, *strategy.outputs))
