"""Level 2 at one point of level 0: options and stages from the MILP, then the exact step time and memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from autoplan.plan.memory import ParamBytes, running_causes, state_causes
from autoplan.plan.plan import Amounts
from autoplan.sharding import CollectiveKind
from autoplan.solver.milp import SolveState
from autoplan.solver.stagecost import (
    SegmentCost,
    Setting,
    StageCost,
    data_sum_bytes,
    in_class,
    optimizer_us,
    param_of,
    scatter_us,
    segment_cost,
    stage_cost,
    tied_us,
)
from autoplan.solver.stages import ChainProblem, OptionCost, SharedParam, StageLimits, solve_stages
from autoplan.solver.tables import Option, Table, shared_params

ROUNDING_BYTES = 4096
"""Taken off the limit, so that the solver's tolerance never exceeds it."""
GAP = 1e-3
"""Relative gap at which a cut into stages counts as optimal."""


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
    amounts: Amounts
    state: SolveState

    @property
    def total_us(self) -> float:
        """Time of a training step."""
        return self.amounts.total

    @property
    def overflow_bytes(self) -> int:
        """Bytes by which the fullest stage exceeds the memory; at most 0 when it fits."""
        return int(max(stage.memory.total for stage in self.stages)) - self.setting.cluster.memory_bytes


def runs_of(setting: Setting) -> tuple[Run, ...]:
    """The chain as runs."""
    lengths = [(kind, len(list(group))) for kind, group in groupby(s.kind for s in setting.sg.segments)]
    starts = accumulate((length for _, length in lengths), initial=0)
    return tuple(
        Run(kind=kind, start=start, length=length) for (kind, length), start in zip(lengths, starts, strict=False)
    )


def solve_step(
    setting: Setting,
    table: Table,
    time_limit_s: float,
    *,
    least_memory: bool = False,
    cutoff_us: float | None = None,
) -> Step | SolveState | float:
    """Best stages at one point, or the state in which the MILP ended without any.

    ``least_memory`` looks for the fewest bytes above the limit instead of the shortest time. When nothing at the
    point is faster than ``cutoff_us``, a lower bound of its time comes back.
    """
    runs = runs_of(setting)
    rows = tuple(_distinct(setting, run, table.options[run.kind]) for run in runs)
    chain = _chain(setting, runs, rows)
    solution = solve_stages(chain, time_limit_s=time_limit_s, gap=GAP, least_memory=least_memory, cutoff_us=cutoff_us)
    if solution.counts is None:
        return solution.objective_us if solution.state is SolveState.BEATEN else solution.state
    edges = [0, *accumulate(sum(map(sum, stage)) for stage in solution.counts)]
    chosen = tuple(
        tuple(rows[r][o][0] for r, row in enumerate(stage) for o, count in enumerate(row) for _ in range(count))
        for stage in solution.counts
    )
    stages = tuple(stage_cost(setting, options, s, edges) for s, options in enumerate(chosen))
    return Step(setting=setting, stages=stages, amounts=step_amounts(setting, stages), state=solution.state)


Priced = tuple[Option, OptionCost]


def _distinct(setting: Setting, run: Run, options: tuple[Option, ...]) -> tuple[Priced, ...]:
    """Options of a run with their prices, those left out that another one beats or equals in everything."""
    kept: list[Priced] = []
    for option in options:
        priced = option_cost(setting, run, option)
        if not any(_beats(other, priced) for _, other in kept):
            kept = [(o, other) for o, other in kept if not _beats(priced, other)]
            kept.append((option, priced))
    return tuple(kept)


def _beats(left: OptionCost, right: OptionCost) -> bool:
    return all(mine <= other for mine, other in zip(_figures(left), _figures(right), strict=True))


def _figures(cost: OptionCost) -> tuple[float, ...]:
    return cost.time_us, cost.end_us, cost.state_bytes, cost.activation_bytes, cost.transient_bytes


def option_cost(setting: Setting, run: Run, option: Option) -> OptionCost:
    """Price of a segment for the MILP; parameters that all its segments share with others are the stage's."""
    data = setting.point.data_axis
    alone = segment_cost(setting, option, _own(setting, run))
    return OptionCost(
        time_us=alone.time_us,
        end_us=alone.end_us,
        state_bytes=sum(state_causes(alone.memory.params, data, setting.optimizer_states)),
        activation_bytes=alone.memory.activation_bytes,
        transient_bytes=sum(running_causes(alone.memory, data)),
    )


def _own(setting: Setting, run: Run) -> tuple[str, ...]:
    """Parameters, as named in the first segment of the class, that are not shared in every segment of the run."""
    shared = set(shared_params(setting.sg))
    segments = setting.sg.segments[run.start : run.start + run.length]
    first = setting.sg.representative(run.kind).params
    return tuple(name for position, name in enumerate(first) if not all(s.params[position] in shared for s in segments))


def _chain(setting: Setting, runs: tuple[Run, ...], rows: tuple[tuple[Priced, ...], ...]) -> ChainProblem:
    point = setting.point
    send = max((setting.send_us(position) for position in range(1, len(setting.sg.segments))), default=0.0)
    shared = shared_params(setting.sg)
    readers = tuple(tuple(r for r, run in enumerate(runs) if _reads(setting, run, name)) for name in shared)
    return ChainProblem(
        lengths=tuple(run.length for run in runs),
        options=tuple(tuple(price for _, price in row) for row in rows),
        stages=tuple(
            StageLimits(
                in_flight=point.in_flight(s),
                fixed_us=send * ((s > 0) + (s < point.pp - 1)),
                fixed_bytes=point.in_flight(s) * setting.prelude_bytes,
            )
            for s in range(point.pp)
        ),
        num_microbatches=point.num_microbatches,
        memory_bytes=max(1, setting.cluster.memory_bytes - ROUNDING_BYTES),
        shared=tuple(_shared(setting, runs, rows, name, at) for name, at in zip(shared, readers, strict=True)),
        readers=readers,
    )


def _reads(setting: Setting, run: Run, name: str) -> bool:
    return any(name in s.params for s in setting.sg.segments[run.start : run.start + run.length])


def _shared(
    setting: Setting, runs: tuple[Run, ...], rows: tuple[tuple[Priced, ...], ...], name: str, readers: tuple[int, ...]
) -> SharedParam:
    run = runs[readers[0]]
    index = next(i for i in range(run.start, run.start + run.length) if name in setting.sg.segments[i].params)
    params: ParamBytes = param_of(setting, rows[readers[0]][0][0], *in_class(setting.sg, index, (name,)))
    end = optimizer_us(setting, params) + scatter_us(setting, params)
    if setting.point.pp > 1:
        end += tied_us(setting, params, 2)
    end += setting.collective_us(CollectiveKind.ALL_REDUCE, data_sum_bytes(setting, params), setting.groups.data)
    data = setting.point.data_axis
    gathered = params.gathered + params.trainable if data.is_sharded else params.trainable
    return SharedParam(state_bytes=sum(state_causes(params, data, setting.optimizer_states)) + gathered, end_us=end)


def step_amounts(setting: Setting, stages: Sequence[StageCost]) -> Amounts:
    """Time of a step by cause.

    A pipeline takes the time of its slowest stage for every microbatch, plus one pass through each other stage (the
    bubble), plus the longest work at the end of a step.
    """
    m = setting.point.num_microbatches
    slowest = max(stages, key=lambda stage: stage.time_us)
    last = max(stages, key=lambda stage: stage.end_us)
    loss_data, loss_pipeline = _loss_us(setting)
    by_cause = (
        ("compute", m * _sum(slowest, lambda s: s.compute_us)),
        (
            "tensor communication",
            m * _sum(slowest, lambda s: s.forward_comm_us + s.backward_comm_us) + _sum(last, lambda s: s.tensor_end_us),
        ),
        (
            "data communication",
            m * (_sum(slowest, lambda s: s.gather_us) + 2 * slowest.held_gather_us)
            + _sum(last, lambda s: s.data_end_us)
            + last.held_scatter_us
            + last.tied_us
            + loss_data,
        ),
        ("pipeline communication", m * slowest.send_us + loss_pipeline),
        ("bubble", sum(stage.time_us for stage in stages) - slowest.time_us),
        ("optimizer", _sum(last, lambda s: s.optimizer_us)),
    )
    return Amounts(by_cause=by_cause)


def _sum(stage: StageCost, term: Callable[[SegmentCost], float]) -> float:
    return sum(map(term, stage.segments))


def _loss_us(setting: Setting) -> tuple[float, float]:
    """Summing the loss over the data axis, and sending it to every stage."""
    num_bytes = loss_bytes(setting)
    data = setting.collective_us(CollectiveKind.ALL_REDUCE, num_bytes, setting.groups.data)
    return data, setting.collective_us(CollectiveKind.BROADCAST, num_bytes, setting.groups.pipeline)


def loss_bytes(setting: Setting) -> int:
    """Bytes of the loss scalar; 0 for a graph without one."""
    loss = setting.sg.graph.loss
    return setting.sg.graph.metas[loss].num_bytes if loss is not None else 0
