"""Plan -> Report: the rows and totals that every renderer shows. Numbers only; renderers choose digits."""

from dataclasses import dataclass

from autoplan.plan.money import Bill
from autoplan.plan.plan import Amounts, CollectiveCount, Plan, Precision, Recompute, SearchStatus
from autoplan.plan.rows import (
    ChoiceFacts,
    by_place,
    choice_facts,
    chunk_of,
    layer_groups,
    place_memory,
    place_ranks,
    weight_groups,
)
from autoplan.plan.runnable import cannot_run
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
    """One stage of the chain. Times are for one microbatch."""

    stage: int
    place: int
    """On the pp axis."""
    chunk: int
    """Which of the stages of its place."""
    layers: tuple[LayerRow, ...]
    forward_us: float
    backward_us: float
    collectives: tuple[CollectiveCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """One place on the pp axis: the devices that run the same stages."""

    place: int
    ranks: tuple[tuple[int, int], ...]
    """Runs of ranks, first and last of each."""
    stages: tuple[int, ...]
    idle_us: float
    """In a step."""
    memory: tuple[Share, ...]
    memory_bytes: float
    limit_bytes: int
    free_bytes: float
    """Negative when it does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """Parameters held alike; placements in their text form."""

    pattern: str
    count: int
    stages: tuple[int, ...]
    tensor: str
    data: str
    expert: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUpRow:
    """A candidate that lost; the figures are None when it was refused."""

    label: str
    step_us: float | None
    slower_us: float | None
    slower_share: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofRow:
    """How good the plan is by the cost model, and what became of the candidates."""

    status: SearchStatus
    gap: float
    """Share of the step by which the optimum may be better; 0 is proven optimal."""
    bound_us: float
    bound_by: str
    num_solved: int
    num_bounded: int
    num_refused: int
    refusals: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a reader is told about a plan."""

    model: str
    cluster: str
    version: str
    mesh: tuple[tuple[str, int], ...]
    num_devices: int
    schedule: str
    chunks: int
    data: str
    shards: int
    expert: int
    offload: bool
    precision: Precision
    batch_size: int
    num_microbatches: int
    microbatch_size: int
    """Samples per microbatch and data rank."""
    step_us: float
    samples_per_s: float | None
    """None when the step takes no time."""
    tokens_per_s: float | None
    """None where samples have no sequence, too."""
    mfu: float | None
    """Share of the devices' peak that model FLOPs use; None where unknown."""
    cannot_run: tuple[str, ...]
    """What keeps this version from running the plan."""
    proof: ProofRow
    choices: tuple[ChoiceFacts, ...]
    step: tuple[Share, ...]
    pipeline_us: float
    """End of the last pass when the schedule is replayed."""
    places: tuple[PlaceRow, ...]
    stages: tuple[StageRow, ...]
    """Place by place, chunk by chunk."""
    weights: tuple[WeightRow, ...]
    runners_up: tuple[RunnerUpRow, ...]
    assumptions: tuple[tuple[str, str], ...]
    bill: Bill | None
    """Time and cost of a training run; None where nobody asked."""


def make_report(plan: Plan, bill: Bill | None = None) -> Report:
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
        chunks=plan.chunks,
        data=plan.data,
        shards=plan.shards,
        expert=plan.expert,
        offload=plan.offload,
        precision=plan.precision,
        batch_size=plan.batch_size,
        num_microbatches=plan.num_microbatches,
        microbatch_size=plan.batch_size // plan.parts,
        step_us=total,
        samples_per_s=plan.batch_size / total * 1e6 if total else None,
        tokens_per_s=plan.tokens / total * 1e6 if total and plan.tokens else None,
        mfu=plan.mfu or None,
        cannot_run=cannot_run(plan),
        proof=_proof_row(plan),
        choices=choice_facts(plan),
        step=_shares(plan.step),
        pipeline_us=timeline.end_us,
        places=tuple(_place_row(plan, place, timeline) for place in range(plan.mesh.size("pp"))),
        stages=tuple(_stage_row(plan, index) for index in by_place(plan)),
        weights=_weight_rows(plan),
        runners_up=_runner_up_rows(plan),
        assumptions=(*plan.assumptions, *_fingerprints(plan)),
        bill=bill,
    )


def _shares(amounts: Amounts) -> tuple[Share, ...]:
    total = amounts.total
    return tuple(Share(cause=c, amount=amount, share=amount / total if total else 0.0) for c, amount in amounts)


def _fingerprints(plan: Plan) -> tuple[tuple[str, str], ...]:
    return (("profile", plan.profile_digest), ("graph", plan.graph_digest))


def _proof_row(plan: Plan) -> ProofRow:
    proof = plan.proof
    return ProofRow(
        status=proof.status,
        gap=proof.gap(plan.step.total),
        bound_us=proof.bound_us,
        bound_by=proof.bound_by,
        num_solved=proof.num_solved,
        num_bounded=proof.num_bounded,
        num_refused=proof.num_refused,
        refusals=proof.refusals,
    )


def _place_row(plan: Plan, place: int, timeline: Timeline) -> PlaceRow:
    memory, limit = place_memory(plan)[place], plan.cluster.memory_bytes
    return PlaceRow(
        place=place,
        ranks=tuple((run[0], run[-1]) for run in place_ranks(plan, place)),
        stages=tuple(index for index, stage in enumerate(plan.stages) if stage.rank == place),
        idle_us=timeline.idle_us(place),
        memory=_shares(memory),
        memory_bytes=memory.total,
        limit_bytes=limit,
        free_bytes=limit - memory.total,
    )


def _stage_row(plan: Plan, index: int) -> StageRow:
    stage = plan.stages[index]
    return StageRow(
        stage=index,
        place=stage.rank,
        chunk=chunk_of(plan, index),
        layers=tuple(
            LayerRow(layers=g.label, count=len(g.numbers), layout=g.layout, recompute=g.recompute)
            for g in layer_groups(plan, stage)
        ),
        forward_us=stage.forward_us,
        backward_us=stage.backward_us,
        collectives=stage.collectives,
    )


def _weight_rows(plan: Plan) -> tuple[WeightRow, ...]:
    return tuple(
        WeightRow(
            pattern=g.label,
            count=g.count,
            stages=g.stages,
            tensor=str(g.tensor),
            data=str(g.data),
            expert=str(g.expert),
        )
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
