"""Level 2 at one point of level 0: options and stages from the chain, then the exact step time and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import le

from autoplan.ir import SegmentedGraph
from autoplan.plan.memory import ParamBytes, rank_memory, running_causes, state_causes
from autoplan.plan.plan import Amounts
from autoplan.plan.schedule import Bubble, Hidden, bubble_terms
from autoplan.sharding import CollectiveKind
from autoplan.solver import places
from autoplan.solver.chain import ChainProblem, Counts, OptionCost, SharedParam, StageLimits
from autoplan.solver.dataranks import data_collectives, sharing, time_us
from autoplan.solver.mesh import Point
from autoplan.solver.milp import SolveState
from autoplan.solver.setting import Setting
from autoplan.solver.stagecost import (
    HeldBytes,
    ParamCost,
    SegmentCost,
    StageCost,
    held_bytes,
    in_class,
    optimizer_us,
    param_cost,
    param_of,
    stage_cost,
    tied_us,
    with_params,
)
from autoplan.solver.stages import least_overflow, solve_stages
from autoplan.solver.tables import Option, Table
from autoplan.solver.tied import Ownership, ownership, settled_params, stage_bytes, with_held, with_tied

ROUNDING_BYTES = 4096
"""Taken off the limit, so that the solver's tolerance never exceeds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive segments of one class."""

    kind: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A complete answer at one point."""

    setting: Setting
    stages: tuple[StageCost, ...]
    """In chain order."""
    memory: tuple[Amounts, ...]
    """Peak bytes of each rank."""
    amounts: Amounts
    state: SolveState

    @property
    def total_us(self) -> float:
        """Time of a training step."""
        return self.amounts.total

    @property
    def peak_bytes(self) -> int:
        """Of the fullest rank."""
        return int(max(memory.total for memory in self.memory))

    @property
    def overflow_bytes(self) -> int:
        """Bytes by which the fullest rank exceeds the memory; at most 0 when it fits."""
        return self.peak_bytes - self.setting.cluster.memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """What became of a point: a step, or the state in which there was none; and what none of its steps can beat."""

    step: Step | None
    state: SolveState
    bound_us: float


def runs_of(sg: SegmentedGraph) -> tuple[Run, ...]:
    """The chain as runs."""
    lengths = [(kind, len(list(group))) for kind, group in groupby(s.kind for s in sg.segments)]
    starts = accumulate((length for _, length in lengths), initial=0)
    return tuple(
        Run(kind=kind, start=start, length=length) for (kind, length), start in zip(lengths, starts, strict=False)
    )


Priced = tuple[Option, OptionCost]
Rows = tuple[tuple[Priced, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedRuns:
    """Runs with their options and prices: the same for every schedule at one way to hold parameters."""

    rows: Rows
    shared: tuple[SharedParam, ...]
    readers: tuple[tuple[int, ...], ...]
    """Per shared parameter: the runs that read it."""
    lengths: tuple[int, ...]
    """Segments of each run."""

    def spread_us(self, point: Point) -> float:
        """A step that no schedule beats: every segment by its fastest option, spread evenly over the ranks."""
        shown = point.num_microbatches - (bubble_of(point).share if point.pp > 1 else 0.0)
        least = (min(cost.time_us + cost.end_us / shown for _, cost in row) for row in self.rows)
        return shown * sum(n * time for n, time in zip(self.lengths, least, strict=True)) / point.pp


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParams:
    """The runs of a chain with the parameters each is priced with: the same for every price."""

    runs: tuple[Run, ...]
    owned: tuple[Ownership, ...]
    """By run."""
    settled: tuple[str, ...]
    """Shared parameters that are priced with their segments."""
    names: tuple[str, ...]
    """Those that are left to the chain."""
    readers: tuple[tuple[int, ...], ...]
    known: dict[tuple[object, ...], HeldBytes] = field(default_factory=dict, repr=False)
    """What was measured: by run, layout and way to share."""


def run_params(sg: SegmentedGraph, num_stages: int) -> RunParams:
    """Who is priced with what; more than one stage are all alike."""
    runs, settled = runs_of(sg), settled_params(sg, num_stages)
    names = tuple(name for name in sg.shared_params if name not in settled)
    return RunParams(
        runs=runs,
        owned=tuple(ownership(sg, run.start, run.length, settled, num_stages) for run in runs),
        settled=settled,
        names=names,
        readers=tuple(tuple(r for r, run in enumerate(runs) if _reads(sg, run, name)) for name in names),
    )


def price_runs(setting: Setting, table: Table, held: RunParams) -> PricedRuns:
    """Price every option of every run."""
    rows = [_distinct(setting, table.options[run.kind], held, r) for r, run in enumerate(held.runs)]
    first = next((r for r, mine in enumerate(held.owned) if mine.held), None)
    if first is not None:
        size = stage_bytes(setting, table, held.settled)
        rows[first] = tuple((option, with_held(cost, setting, size)) for option, cost in rows[first])
    shared = tuple(
        _shared(setting, held.runs, tuple(rows), name, at) for name, at in zip(held.names, held.readers, strict=True)
    )
    return PricedRuns(
        rows=tuple(rows), shared=shared, readers=held.readers, lengths=tuple(run.length for run in held.runs)
    )


def solve_step(
    setting: Setting,
    priced: PricedRuns,
    *,
    gap: float,
    cutoff_us: float = float("inf"),
    cuts: tuple[int, ...] | None = None,
    time_limit_s: float = 60.0,
    thorough: bool = False,
) -> Solved:
    """Best stages at one point, proven within ``gap``; ``cuts`` pins where stages begin."""
    chain = chain_of(setting, priced, cuts)
    solution = solve_stages(chain, gap=gap, cutoff_us=cutoff_us, time_limit_s=time_limit_s, thorough=thorough)
    if solution.counts is None:
        return Solved(step=None, state=solution.state, bound_us=solution.bound_us)
    step = step_of(setting, priced, solution.counts, solution.state)
    return Solved(step=step, state=solution.state, bound_us=min(solution.bound_us, step.total_us))


def nearest_step(setting: Setting, priced: PricedRuns, cuts: tuple[int, ...] | None = None) -> Step | None:
    """The stages that need the fewest bytes above the limit, whatever the time."""
    counts = least_overflow(chain_of(setting, priced, cuts))
    return None if counts is None else step_of(setting, priced, counts, SolveState.FEASIBLE)


def step_of(setting: Setting, priced: PricedRuns, counts: Counts, state: SolveState) -> Step:
    """Price the chosen counts exactly."""
    chosen = tuple(
        tuple(priced.rows[r][o][0] for r, row in enumerate(stage) for o, count in enumerate(row) for _ in range(count))
        for stage in counts
    )
    return step_from(setting, chosen, state)


def step_from(setting: Setting, chosen: Sequence[tuple[Option, ...]], state: SolveState) -> Step:
    """The step of stages that run these options."""
    edges = [0, *accumulate(len(options) for options in chosen)]
    stages = tuple(stage_cost(setting, options, s, edges) for s, options in enumerate(chosen))
    return Step(
        setting=setting,
        stages=stages,
        memory=rank_memories(setting, stages),
        amounts=step_amounts(setting, stages),
        state=state,
    )


def rank_memories(setting: Setting, stages: Sequence[StageCost]) -> tuple[Amounts, ...]:
    """Peak bytes of every rank."""
    flying = flying_of(setting.point)
    return tuple(
        rank_memory([stages[s].memory for s in mine], setting.data_axis, flying[rank], setting.prelude_bytes)
        for rank, mine in enumerate(ranks_of(setting.point))
    )


def ranks_of(point: Point) -> tuple[tuple[int, ...], ...]:
    """Stages of each rank of the pipeline."""
    return places.ranks_of(point.schedule, point.pp, point.chunks)


def flying_of(point: Point) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per rank: microbatches that its chunks hold, at the moments that may be the fullest."""
    return places.flying_of(point.schedule, point.pp, point.chunks, point.num_microbatches)


def bubble_of(point: Point) -> Bubble:
    """How the schedule's bubble is priced, the rows scaled to whole sums over the ranks."""
    return bubble_terms(point.schedule, point.pp, point.chunks)


def scaled_rows(point: Point) -> tuple[Hidden, ...]:
    """What the schedule hides, per microsecond of each part summed over the ranks."""
    share = (point.pp - 1) / point.pp
    return tuple(Hidden(*(share * part for part in row)) for row in bubble_of(point).rows)


def _distinct(setting: Setting, options: tuple[Option, ...], held: RunParams, run: int) -> tuple[Priced, ...]:
    """Options of a run with their prices, those left out that another one beats or equals in everything."""
    layouts: dict[int, ParamCost] = {}
    kept: list[tuple[Priced, tuple[float, ...]]] = []
    for option in options:
        layout = id(option.resolved)
        if layout not in layouts:
            layouts[layout] = param_cost(setting, _measured(setting, option, held, run))
        priced = option_cost(setting, option, held.owned[run], layouts[layout])
        figures = _figures(priced)
        if not any(_beats(other, figures) for _, other in kept):
            kept = [one for one in kept if not _beats(figures, one[1])]
            kept.append(((option, priced), figures))
    return tuple(one for one, _ in kept)


def _measured(setting: Setting, option: Option, held: RunParams, run: int) -> HeldBytes:
    """``held_bytes``, remembered: tables keep their layouts, so that a layout is known by its identity."""
    point, mine = setting.point, held.owned[run]
    found = run, id(option.resolved), point.data, point.shards, point.expert, point.expert_shards
    if found not in held.known:
        held.known[found] = held_bytes(setting, option, mine.owned, mine.held)
    return held.known[found]


def _beats(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return all(map(le, left, right))


def _figures(cost: OptionCost) -> tuple[float, ...]:
    """All that counts, less is better; what a schedule can hide counts on the other side."""
    rest = cost.time_us - cost.weight_us
    return (
        cost.time_us, rest, cost.time_us - cost.forward_us, cost.forward_us, cost.end_us,
        cost.state_bytes, cost.activation_bytes, cost.transient_bytes,
    )  # fmt: skip


def option_cost(setting: Setting, option: Option, mine: Ownership, held: ParamCost) -> OptionCost:
    """Price of a segment for the chain; parameters that it shares and that are not settled are the stage's."""
    data = setting.data_axis
    alone = with_params(setting, option, held)
    cost = OptionCost(
        time_us=alone.time_us,
        forward_us=alone.forward_us + alone.forward_comm_us + alone.forward_data_us,
        weight_us=alone.weight_us,
        end_us=alone.end_us,
        state_bytes=sum(state_causes(alone.memory.params, data)),
        activation_bytes=alone.memory.activation_bytes,
        transient_bytes=sum(running_causes(alone.memory, data)),
    )
    return with_tied(setting, cost, option, mine.tied) if mine.tied else cost


def chain_of(setting: Setting, priced: PricedRuns, cuts: tuple[int, ...] | None) -> ChainProblem:
    """The problem of level 2 at a point."""
    point = setting.point
    last = point.num_stages - 1
    send = setting.slowest_send_us
    return ChainProblem(
        lengths=priced.lengths,
        options=tuple(tuple(price for _, price in row) for row in priced.rows),
        stages=tuple(
            StageLimits(
                fixed_us=send * ((s > 0) + (s < last)),
                fixed_bytes=setting.prelude_bytes,
                forward_us=send * (s < last),
            )
            for s in range(point.num_stages)
        ),
        ranks=ranks_of(point),
        in_flight=flying_of(point),
        num_microbatches=point.num_microbatches,
        bubble_share=bubble_of(point).share,
        bubble_rows=scaled_rows(point),
        memory_bytes=max(1, setting.cluster.memory_bytes - ROUNDING_BYTES),
        shared=priced.shared,
        readers=priced.readers,
        constant_us=sum(_loss_us(setting)),
        cuts=cuts,
    )


def _reads(sg: SegmentedGraph, run: Run, name: str) -> bool:
    return any(name in s.params for s in sg.segments[run.start : run.start + run.length])


def _shared(setting: Setting, runs: tuple[Run, ...], rows: Rows, name: str, readers: tuple[int, ...]) -> SharedParam:
    run = runs[readers[0]]
    index = next(i for i in range(run.start, run.start + run.length) if name in setting.sg.segments[i].params)
    params: ParamBytes = param_of(setting, rows[readers[0]][0][0], *in_class(setting.sg, index, (name,)))
    issued = data_collectives(setting, params, params, sharing(setting, False))
    end = optimizer_us(setting, params) + time_us(setting, issued, "end") + time_us(setting, issued, "last backward")
    if setting.point.num_stages > 1:
        end += tied_us(setting, params, 2)
    data = setting.data_axis
    gathered = params.gathered if data.gathers else 0
    gradients = data.gradient_bytes(params.trainable) if data.ranks > 1 else 0
    return SharedParam(state_bytes=sum(state_causes(params, data)) + gathered + gradients, end_us=end)


def step_amounts(setting: Setting, stages: Sequence[StageCost]) -> Amounts:
    """Time of a step by cause.

    A pipeline takes the time of its slowest rank for every microbatch, plus the bubble of its schedule, plus the
    longest work at the end of a step.
    """
    m = setting.point.num_microbatches
    ranks = [[stages[s] for s in mine] for mine in ranks_of(setting.point)]
    slowest = max(ranks, key=lambda rank: sum(stage.time_us for stage in rank))
    last = max(ranks, key=lambda rank: sum(stage.end_us for stage in rank))
    loss_data, loss_pipeline = _loss_us(setting)
    held = sum(stage.held_us[0] + stage.held_us[1] for stage in slowest)
    once = sum(stage.held_us[2] + stage.tied_us for stage in last)
    by_cause = (
        ("compute", m * _sum(slowest, lambda s: s.compute_us)),
        ("tensor communication", m * _sum(slowest, lambda s: s.comm_us) + _sum(last, lambda s: s.tensor_end_us)),
        (
            "data communication",
            m * (_sum(slowest, lambda s: s.data_us) + held) + _sum(last, lambda s: s.data_end_us) + once + loss_data,
        ),
        ("pipeline communication", m * sum(sum(stage.send_us) for stage in slowest) + loss_pipeline),
        ("bubble", bubble_us(setting, ranks)),
        ("optimizer", _sum(last, lambda s: s.optimizer_us)),
    )
    return Amounts(by_cause=by_cause)


def bubble_us(setting: Setting, ranks: Sequence[Sequence[StageCost]]) -> float:
    """Time in which the slowest rank waits, by the closed form of the schedule."""
    times = [sum(stage.time_us for stage in rank) for rank in ranks]
    everything = [stage for rank in ranks for stage in rank]
    parts = (
        sum(stage.forward_us for stage in everything),
        sum(stage.backward_us - stage.weight_us for stage in everything),
        sum(stage.weight_us for stage in everything),
    )
    hidden = min(sum(h * part for h, part in zip(row, parts, strict=True)) for row in scaled_rows(setting.point))
    return max(0.0, bubble_of(setting.point).share * (sum(times) - max(times) - hidden))


def _sum(rank: Sequence[StageCost], term: Callable[[SegmentCost], float]) -> float:
    return sum(term(segment) for stage in rank for segment in stage.segments)


def _loss_us(setting: Setting) -> tuple[float, float]:
    """Summing the loss over the data ranks, and sending it to every stage."""
    num_bytes = loss_bytes(setting)
    data = setting.collective_us(CollectiveKind.ALL_REDUCE, num_bytes, setting.groups.data)
    return data, setting.collective_us(CollectiveKind.BROADCAST, num_bytes, setting.groups.pipeline)


def loss_bytes(setting: Setting) -> int:
    """Bytes of the loss scalar; 0 for a graph without one."""
    loss = setting.sg.graph.loss
    return setting.sg.graph.metas[loss].num_bytes if loss is not None else 0
