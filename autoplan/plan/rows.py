"""A plan's facts gathered for people: which layers, which ranks, which weights. No digits are chosen here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.plan.patterns import by_pattern
from autoplan.plan.plan import Amounts, Plan, Recompute, Stage
from autoplan.plan.words import ranges_text
from autoplan.sharding import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Segments of a stage that have one layout, so that they are alike."""

    kind: str
    numbers: tuple[int, ...]
    """Which of its kind in the whole chain: (0, 1, 2) are the first three blocks."""
    alone: bool
    """Whether the chain has no other of its kind."""
    layout: str
    recompute: Recompute

    @property
    def label(self) -> str:
        """``embed``, ``block 3``, ``block 0-15 alike``."""
        if self.alone:
            return self.kind
        return f"{self.kind} {ranges_text(self.numbers)}" + (" alike" if len(self.numbers) > 1 else "")


def layer_groups(plan: Plan, stage: Stage) -> tuple[LayerGroup, ...]:
    """The layers of a stage by layout, in order of first appearance."""
    numbers: dict[str, list[int]] = {}
    for segment, name in zip(range(stage.start, stage.end), stage.layouts, strict=True):
        kind = plan.segment_kinds[segment]
        numbers.setdefault(name, []).append(plan.segment_kinds[:segment].count(kind))
    groups = []
    for name, found in numbers.items():
        layout = plan.layout(name)
        groups.append(
            LayerGroup(
                kind=plan.kind_names[layout.kind],
                numbers=tuple(found),
                alone=plan.segment_kinds.count(layout.kind) == 1,
                layout=name,
                recompute=layout.recompute,
            )
        )
    return tuple(groups)


def place_ranks(plan: Plan, place: int) -> tuple[range, ...]:
    """The ranks of a place on the pp axis, as runs."""
    at = plan.mesh.axes.index("pp")
    inner, pp = math.prod(plan.mesh.sizes[at + 1 :]), plan.mesh.sizes[at]
    if pp == 1:
        return (range(plan.mesh.num_devices),)
    starts = (outer * pp * inner + place * inner for outer in range(math.prod(plan.mesh.sizes[:at])))
    return tuple(range(start, start + inner) for start in starts)


def chunk_of(plan: Plan, index: int) -> int:
    """Which chunk of its place a stage is."""
    return sum(stage.rank == plan.stages[index].rank for stage in plan.stages[:index])


def by_place(plan: Plan) -> tuple[int, ...]:
    """Indices of the stages, place by place and chunk by chunk."""
    return tuple(sorted(range(len(plan.stages)), key=lambda index: (plan.stages[index].rank, index)))


def place_memory(plan: Plan) -> tuple[Amounts, ...]:
    """Peak bytes of a device at each place on the pp axis: what its stages say, which each count all of its chunks."""
    first = {stage.rank: stage.memory for stage in reversed(plan.stages)}
    return tuple(first[place] for place in sorted(first))


def communication_us(step: Amounts) -> float:
    """Exposed communication of a step: the causes that are named so."""
    return sum(amount for cause, amount in step if cause.endswith("communication"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFacts:
    """A good plan in figures; rank 1 is the fastest. Rates are None when the step takes no time."""

    rank: int
    label: str
    step_us: float
    samples_per_s: float | None
    tokens_per_s: float | None
    """None where samples have no sequence, too."""
    mfu: float | None
    """None where unknown."""
    peak_bytes: int
    bubble_share: float
    communication_share: float
    on_front: bool
    """No other plan that was solved is both faster and smaller."""


def choice_facts(plan: Plan) -> tuple[ChoiceFacts, ...]:
    """The good plans of a search, fastest first."""
    facts = []
    for position, choice in enumerate(plan.choices):
        total = choice.step.total
        whole = total or 1.0
        mfu = plan.mfu * plan.step.total / total if total else 0.0
        facts.append(
            ChoiceFacts(
                rank=position + 1,
                label=choice.label,
                step_us=total,
                samples_per_s=plan.batch_size / total * 1e6 if total else None,
                tokens_per_s=plan.tokens / total * 1e6 if total and plan.tokens else None,
                mfu=mfu or None,
                peak_bytes=choice.peak_bytes,
                bubble_share=dict(choice.step).get("bubble", 0.0) / whole,
                communication_share=communication_us(choice.step) / whole,
                on_front=choice.on_front,
            )
        )
    return tuple(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Parameters that differ only in the numbers of their name and are held alike."""

    pattern: str
    layers: tuple[int, ...]
    """The outermost numbers of their names when the pattern has other members held otherwise, else empty."""
    count: int
    tensor: Placement
    data: Placement
    expert: Placement
    stages: tuple[int, ...]
    """Stages that hold at least one of them."""

    @property
    def label(self) -> str:
        """``h.*.attn.weight``, or ``h.*.attn.weight, layers 0-3``."""
        return self.pattern + (f", layers {ranges_text(self.layers)}" if self.layers else "")


def weight_groups(plan: Plan) -> tuple[WeightGroup, ...]:
    """How every weight is held, folded over layers, in the model's order."""
    stages_of = _stages_by_param(plan)
    placements = {p.name: (p.tensor, p.data, p.expert) for p in plan.params}
    groups = []
    for pattern, names in by_pattern(tuple(placements)).items():
        held: dict[tuple[Placement, Placement, Placement], list[str]] = {}
        for name in names:
            held.setdefault(placements[name], []).append(name)
        for (tensor, data, expert), members in held.items():
            groups.append(
                WeightGroup(
                    pattern=members[0] if len(members) == 1 else pattern,
                    layers=outer_numbers(members) if len(held) > 1 and len(members) > 1 else (),
                    count=len(members),
                    tensor=tensor,
                    data=data,
                    expert=expert,
                    stages=tuple(sorted({stage for name in members for stage in stages_of.get(name, ())})),
                )
            )
    return tuple(groups)


def _stages_by_param(plan: Plan) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for index, stage in enumerate(plan.stages):
        for names in plan.segment_params[stage.start : stage.end]:
            for name in names:
                found.setdefault(name, set()).add(index)
    return found


def outer_numbers(names: Sequence[str]) -> tuple[int, ...]:
    """The outermost number in each name, ascending: those of the layers."""
    return tuple(sorted({next(int(part) for part in name.split(".") if part.isdigit()) for name in names}))


def tied_across_stages(plan: Plan) -> tuple[str, ...]:
    """Parameters that more than one stage holds a copy of."""
    return tuple(name for name, stages in _stages_by_param(plan).items() if len(stages) > 1)
