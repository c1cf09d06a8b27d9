"""Plan -> Report: the rows and totals that every renderer shows. Numbers only; renderers choose digits."""

from dataclasses import dataclass

from autoplan.plan.plan import Amounts, CollectiveCount, Plan, Recompute
from autoplan.plan.rows import layer_groups, stage_ranks, weight_groups
from autoplan.report.timeline import Timeline, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One cause of a total, in the total's unit, and its share of it (0 to 1)."""

    cause: str
    amount: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """Layers of a stage that are alike."""

    layers: str
    count: int
    layout: str
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One pipeline stage. Times are for one microbatch, except ``idle_us``, which is a step's."""

    stage: int
    first_rank: int
    last_rank: int
    layers: tuple[LayerRow, ...]
    forward_us: float
    backward_us: float
    idle_us: float
    memory: tuple[Share, ...]
    memory_bytes: float
    limit_bytes: int
    free_bytes: float
    """Negative when the stage does not fit."""
    collectives: tuple[CollectiveCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """Parameters held alike; placements in their text form."""

    pattern: str
    count: int
    stages: tuple[int, ...]
    tensor: str
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUpRow:
    """A candidate that lost; the figures are None when it was refused."""

    label: str
    step_us: float | None
    slower_us: float | None
    slower_share: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a reader is told about a plan."""

    model: str
    cluster: str
    version: str
    mesh: tuple[tuple[str, int], ...]
    num_devices: int
    schedule: str
    data: str
    batch_size: int
    num_microbatches: int
    microbatch_size: int
    """Samples per microbatch and data rank."""
    step_us: float
    samples_per_s: float | None
    """None when the step takes no time."""
    step: tuple[Share, ...]
    pipeline_us: float
    """End of the last pass when the schedule is replayed."""
    stages: tuple[StageRow, ...]
    weights: tuple[WeightRow, ...]
    runners_up: tuple[RunnerUpRow, ...]
    assumptions: tuple[tuple[str, str], ...]


def make_report(plan: Plan) -> Report:
    """Gather and total what a plan says."""
    timeline = simulate(plan)
    total = plan.step.total
    return Report(
        model=plan.model,
        cluster=str(plan.cluster),
        version=plan.version,
        mesh=tuple(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)),
        num_devices=plan.mesh.num_devices,
        schedule=plan.schedule,
        data=plan.data,
        batch_size=plan.batch_size,
        num_microbatches=plan.num_microbatches,
        microbatch_size=plan.batch_size // plan.parts,
        step_us=total,
        samples_per_s=plan.batch_size / total * 1e6 if total else None,
        step=_shares(plan.step),
        pipeline_us=timeline.end_us,
        stages=tuple(_stage_row(plan, index, timeline) for index in range(len(plan.stages))),
        weights=_weight_rows(plan),
        runners_up=_runner_up_rows(plan),
        assumptions=(*plan.assumptions, *_fingerprints(plan)),
    )


def _shares(amounts: Amounts) -> tuple[Share, ...]:
    total = amounts.total
    return tuple(Share(cause=c, amount=amount, share=amount / total if total else 0.0) for c, amount in amounts)


def _fingerprints(plan: Plan) -> tuple[tuple[str, str], ...]:
    return (("profile", plan.profile_digest), ("graph", plan.graph_digest))


def _stage_row(plan: Plan, index: int, timeline: Timeline) -> StageRow:
    stage, (first, last) = plan.stages[index], stage_ranks(plan, index)
    limit = plan.cluster.memory_bytes
    return StageRow(
        stage=index,
        first_rank=first,
        last_rank=last,
        layers=tuple(
            LayerRow(layers=g.label, count=len(g.numbers), layout=g.layout, recompute=g.recompute)
            for g in layer_groups(plan, stage)
        ),
        forward_us=stage.forward_us,
        backward_us=stage.backward_us,
        idle_us=timeline.idle_us(index),
        memory=_shares(stage.memory),
        memory_bytes=stage.memory.total,
        limit_bytes=limit,
        free_bytes=limit - stage.memory.total,
        collectives=stage.collectives,
    )


def _weight_rows(plan: Plan) -> tuple[WeightRow, ...]:
    return tuple(
        WeightRow(pattern=g.label, count=g.count, stages=g.stages, tensor=str(g.tensor), data=str(g.data))
        for g in weight_groups(plan)
    )


def _runner_up_rows(plan: Plan) -> tuple[RunnerUpRow, ...]:
    rows = []
    for other in plan.runners_up:
        slower = None if other.step_us is None else other.step_us - plan.step.total
        share = slower / plan.step.total if slower is not None and plan.step.total else None
        rows.append(
            RunnerUpRow(
                label=other.label, step_us=other.step_us, slower_us=slower, slower_share=share, reason=other.reason
            )
        )
    return tuple(rows)
