"""Levels 0 to 2 together: points in the order of their lower bounds, solved until none can beat the best found."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autoplan.sharding import Shard
from autoplan.solver.bounds import class_us, least_state_bytes, lower_bound_us, points
from autoplan.solver.build import Model, crossing_placement, crossing_values
from autoplan.solver.mesh import Point
from autoplan.solver.milp import SolveState
from autoplan.solver.pins import tensor_degrees
from autoplan.solver.problem import local_bytes
from autoplan.solver.request import Request
from autoplan.solver.stagecost import Setting
from autoplan.solver.step import Step, solve_step
from autoplan.solver.tables import Option, Tables

Progress = Callable[[str], None]
_STAGES_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a point is not the answer; ``step_us`` is its time, its lower bound when ``is_bound``, None if refused."""

    point: Point
    step_us: float | None
    is_bound: bool = False
    reason: str = ""
    step: Step | None = None


@dataclass(slots=True, kw_only=True)
class Search:
    """State of one search: the best step so far and what happened to every other point."""

    tables: Tables
    request: Request
    deadline: float
    progress: Progress
    best: Step | None = None
    idle: Step | None = None
    """Best step whose tensor axis splits nothing: the answer only where there is no other."""
    losses: dict[tuple[int, int, int], Loss] = field(default_factory=dict)
    bound_us: float = 0.0
    """Least lower bound among the points that were not solved; 0 before the search ends."""
    out_of_time: bool = False
    num_solved: int = 0

    def time_left_s(self) -> float:
        """Seconds until the time limit."""
        return self.deadline - time.monotonic()

    def note(self, loss: Loss) -> None:
        """Keep the best entry of each mesh: a solved one before a bound before a refusal."""
        old = self.losses.get(loss.point.degrees)
        if old is None or _rank(loss) < _rank(old):
            self.losses[loss.point.degrees] = loss


def _rank(loss: Loss) -> tuple[int, float]:
    if loss.step_us is None:
        return 2, 0.0
    return int(loss.is_bound), loss.step_us


def all_points(tables: Tables, request: Request) -> list[Point]:
    """Points that the pins, the devices, the heads and the batch allow."""
    batch = tables.sg.graph.batch_size
    degrees = tensor_degrees(tables.sg, tables.cluster)
    found = list(points(request, tables.cluster, batch, len(tables.sg.segments), degrees))
    if not tables.split.obstacle:
        return found
    whole = {
        Point(pp=p.pp, dp=1, tp=p.tp, microbatch=batch, num_microbatches=1, data="replicate")
        for p in found
        if p.dp == 1 and p.pp == 1
    }
    return sorted(whole)


def search(tables: Tables, request: Request, progress: Progress) -> Search:
    """Find the best step. Deterministic unless the time limit strikes; then ``out_of_time`` says so."""
    state = Search(tables=tables, request=request, deadline=time.monotonic() + request.time_limit_s, progress=progress)
    todo = sorted((_bound(tables, point), point) for point in all_points(tables, request))
    for index, (bound, point) in enumerate(todo):
        if state.best is not None and state.time_left_s() <= 0:
            state.out_of_time = True
        if state.out_of_time or (state.best is not None and bound >= state.best.total_us):
            state.bound_us = bound
            for later_bound, later in todo[index:]:
                state.note(Loss(point=later, step_us=later_bound, is_bound=True))
            break
        _try_point(state, point)
    state.best = state.best or state.idle
    return state


def _bound(tables: Tables, point: Point) -> float:
    return lower_bound_us(tables, point, class_us(tables, point.microbatch))


def _try_point(state: Search, point: Point) -> None:
    limit = state.tables.cluster.memory_bytes
    least = least_state_bytes(state.tables.sg, point, state.request.optimizer_states)
    if least > limit:
        state.note(Loss(point=point, step_us=None, reason=_too_large(least, limit)))
        return
    found = [solve_point(state, point, sequence) for sequence in ((True, False) if point.tp > 1 else (False,))]
    steps = sorted((step for step in found if isinstance(step, Step)), key=lambda step: step.total_us)
    useful = [step for step in steps if splits_work(step) or state.request.pins_tensor]
    if useful:
        _accept(state, useful[0])
        return
    if steps:
        state.note(Loss(point=point, step_us=None, reason="at this size the tensor axis would split nothing"))
        if state.idle is None or steps[0].total_us < state.idle.total_us:
            state.idle = steps[0]
        return
    bounds = [step for step in found if isinstance(step, float)]
    if bounds:
        state.note(Loss(point=point, step_us=min(bounds), is_bound=True))
    else:
        reason = "; ".join(sorted({_why(s) for s in found if isinstance(s, SolveState)}))
        state.note(Loss(point=point, step_us=None, reason=reason))


def splits_work(step: Step) -> bool:
    """Whether the tensor axis does anything: with tp > 1, some op is split over it."""
    if step.setting.point.tp == 1:
        return True
    options = {option.name: option for stage in step.stages for option in stage.options}
    strategies = [candidate.strategy for option in options.values() for _, candidate in option.resolved.nodes]
    return any(isinstance(p, Shard) for strategy in strategies for p in (*strategy.inputs, *strategy.outputs))


def _accept(state: Search, step: Step) -> None:
    state.note(Loss(point=step.setting.point, step_us=step.total_us, step=step))
    if state.best is None or step.total_us < state.best.total_us:
        state.best = step
        state.progress(f"{step.setting.point}: {step.total_us / 1e3:.2f} ms per step")


def _too_large(least: int, limit: int) -> str:
    return f"its parameters, gradients and optimizer states alone need {least / 2**30:.1f} of {limit / 2**30:.1f} GiB"


def _why(state: SolveState) -> str:
    return "no cut into stages fits the memory" if state is SolveState.INFEASIBLE else state.value


def solve_point(state: Search, point: Point, sequence: bool) -> Step | SolveState | float:
    """Best step at a point; the state of the MILP when it has none; its lower bound when that cannot beat the best."""
    table = state.tables.table(point.tp, point.microbatch, sequence)
    if state.best is not None:
        bound = lower_bound_us(state.tables, point, tuple(_fastest_us(row) * point.tp for row in table.options))
        if bound >= state.best.total_us:
            return bound
    state.num_solved += 1
    limit = min(_STAGES_LIMIT_S, max(0.5, state.time_left_s()))
    cutoff = None if state.best is None else state.best.total_us
    return solve_step(setting_at(state.tables, state.request, point, sequence), table, limit, cutoff_us=cutoff)


def _fastest_us(options: tuple[Option, ...]) -> float:
    """One segment by its fastest option, tensor communication included."""
    costs = [option.cost for option in options]
    return min(c.forward_us + c.backward_us + c.forward_comm_us + c.backward_comm_us for c in costs)


def setting_at(tables: Tables, request: Request, point: Point, sequence: bool) -> Setting:
    """What is fixed at one point."""
    model = tables.model(point.microbatch)
    return Setting(
        sg=tables.sg,
        cluster=tables.cluster,
        cost=tables.cost,
        point=point,
        optimizer_states=request.optimizer_states,
        trainable={param.value: param.trainable for param in tables.sg.graph.params},
        prelude_bytes=_prelude_bytes(model),
        cut_bytes=cut_bytes(model, point.tp, sequence),
        sequence=sequence,
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
