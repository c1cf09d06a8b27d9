"""The plan in words: stable plain text of at most 120 columns, for people and golden tests."""

import textwrap
from collections.abc import Iterator, Sequence

from autoplan.plan.plan import Plan
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
from autoplan.plan.summary import not_yet_words, over_data_words, proof_pairs, summary_pairs
from autoplan.plan.words import (
    WIDTH,
    bytes_text,
    data_words,
    ranges_text,
    ranks_text,
    rate_text,
    share_text,
    table,
    tensor_words,
    time_text,
)

_STAGES_ABREAST = 6
"""Columns of the memory table before it starts anew below."""


def plan_text(plan: Plan) -> str:
    """Mesh, proof, stages, weights, predicted time and memory, what lost, and all assumptions."""
    sections = (
        _summary(plan),
        ["Proof", *pairs_lines(proof_pairs(plan))],
        _choices(plan),
        _stages(plan),
        _weights(plan),
        _step(plan),
        _memory(plan),
        _collectives(plan),
        _runners_up(plan),
        _assumptions(plan),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def pairs_lines(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Name and text in two columns, the text wrapped."""
    width = max(len(name) for name, _ in pairs) + 2
    lines = []
    for name, text in pairs:
        indent = " " * (width + 2)
        wrapped = textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
        lines.append(f"  {name}" + wrapped[len(name) + 2 :])
    return lines


def _summary(plan: Plan) -> list[str]:
    headline = textwrap.wrap(f"Plan for {plan.model} on {plan.cluster}", WIDTH)
    not_yet = textwrap.wrap(not_yet_words(plan), WIDTH, initial_indent="  ", subsequent_indent="  ")
    return [*headline, *pairs_lines(summary_pairs(plan)), *not_yet]


def _choices(plan: Plan) -> list[str]:
    """The good plans beside the chosen one; nothing when there are none."""
    found = choice_facts(plan)
    if len(found) < 2:
        return []
    unit = "tokens/s" if plan.tokens else "samples/s"
    header = ("rank", "plan", "step", unit, "MFU", "memory", "bubble", "comm.", "front")
    lines = table(header, [_choice(facts) for facts in found], align="><>>>>>><", wrap=(1,))
    note = "  1 is this plan; comm.: exposed communication; *: no other plan that was solved is both faster and smaller"
    return ["Good plans", *lines, note]


def _choice(facts: ChoiceFacts) -> tuple[str, ...]:
    rate = facts.tokens_per_s or facts.samples_per_s
    return (
        str(facts.rank),
        facts.label,
        time_text(facts.step_us),
        rate_text(rate) if rate else "-",
        share_text(facts.mfu) if facts.mfu else "-",
        bytes_text(facts.peak_bytes),
        share_text(facts.bubble_share),
        share_text(facts.communication_share),
        "*" if facts.on_front else "",
    )


def _stages(plan: Plan) -> list[str]:
    """One row per group of layers; with several chunks the stages of a place stand below each other."""
    rows = [row for index in by_place(plan) for row in _stage_rows(plan, index)]
    several = ("place", "chunk") if plan.chunks > 1 else ()
    header = (*several, "stage", "ranks", "layers", "recompute", "layout", "forward", "backward", "memory", "of limit")
    note = "  forward and backward: one microbatch, communication included"
    before = len(several) + 2
    return ["Stages", *table(header, rows, align=">" * before + "<<<>>>>", wrap=(before - 1, before, before + 2)), note]


def _stage_rows(plan: Plan, index: int) -> Iterator[tuple[str, ...]]:
    """A stage's facts stand on its first row, those of its place on the first row of the place."""
    stage, chunk = plan.stages[index], chunk_of(plan, index)
    for position, group in enumerate(layer_groups(plan, stage)):
        place, ranks, *memory = _place_facts(plan, stage.rank) if position == chunk == 0 else ("",) * 4
        several = (place, str(chunk) if position == 0 else "") if plan.chunks > 1 else ()
        facts = (str(index), time_text(stage.forward_us), time_text(stage.backward_us))
        name, *times = facts if position == 0 else ("",) * 3
        yield (*several, name, ranks, group.label, group.recompute, group.layout, *times, *memory)


def _place_facts(plan: Plan, place: int) -> tuple[str, ...]:
    used = place_memory(plan)[place].total
    return (str(place), ranks_text(place_ranks(plan, place)), bytes_text(used), share_text(used / _limit(plan)))


def _limit(plan: Plan) -> int:
    return plan.cluster.memory_bytes


def _weights(plan: Plan) -> list[str]:
    if not plan.params:
        return []
    tp, experts = plan.mesh.size("tp"), plan.expert > 1
    rows = [
        (
            group.label,
            str(group.count),
            ranges_text(group.stages),
            tensor_words(group.tensor) if tp > 1 else "-",
            *((data_words(group.expert),) if experts else ()),
            data_words(group.data) if plan.data_ranks > 1 else "-",
        )
        for group in weight_groups(plan)
    ]
    over_expert = (f"over ep {plan.expert}",) if experts else ()
    header = ("weight", "count", "stage", f"over tp {tp}", *over_expert, over_data_words(plan))
    return ["Weights", *table(header, rows, align="<>><<<" if experts else "<>><<", wrap=range(6 if experts else 5))]


def _step(plan: Plan) -> list[str]:
    total = plan.step.total
    rows = [(cause, time_text(amount), share_text(amount / total if total else 0)) for cause, amount in plan.step]
    rows.append(("total", time_text(total), share_text(1)))
    return ["Predicted time of a training step", *table(("cause", "time", "share"), rows, align="<>>")]


def _memory(plan: Plan) -> list[str]:
    by = "place on the pp axis, all its chunks together" if plan.chunks > 1 else "stage"
    lines, places = [f"Predicted peak memory of a device, by {by}"], place_memory(plan)
    for start in range(0, len(places), _STAGES_ABREAST):
        lines += _memory_table(plan, range(start, min(start + _STAGES_ABREAST, len(places))))
    return lines


def _memory_table(plan: Plan, part: range) -> list[str]:
    memory = [place_memory(plan)[place] for place in part]
    amounts = [dict(found) for found in memory]
    causes = dict.fromkeys(cause for amount in amounts for cause in amount)
    rows = [[cause, *(bytes_text(amount.get(cause, 0)) for amount in amounts)] for cause in causes]
    limit, totals = _limit(plan), [found.total for found in memory]
    rows.append(["total", *map(bytes_text, totals)])
    rows.append(["limit", *(bytes_text(limit) for _ in part)])
    rows.append(
        ["free", *(bytes_text(limit - t) if t <= limit else f"over by {bytes_text(t - limit)}" for t in totals)]
    )
    name = "place" if plan.chunks > 1 else "stage"
    return table(["cause", *(f"{name} {index}" for index in part)], rows, align="<" + ">" * len(part))


def _collectives(plan: Plan) -> list[str]:
    """Stages that send the same are one row."""
    stages_of: dict[tuple[str, ...], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for c in stage.collectives:
            row = (c.axis, c.kind.value, f"{c.count:,}", bytes_text(c.num_bytes))
            stages_of.setdefault(row, []).append(index)
    if not stages_of:
        return []
    rows = [(*row, ranges_text(stages)) for row, stages in stages_of.items()]
    header = ("axis", "collective", "count", "bytes", "on stage")
    return ["What one rank sends and receives in a step", *table(header, rows, align="<<>><", wrap=(4,))]


def _runners_up(plan: Plan) -> list[str]:
    lines = ["Runners-up"]
    for other in plan.runners_up:
        step = "refused" if other.step_us is None else f"{time_text(other.step_us)}{_loss(plan, other.step_us)}"
        lines += textwrap.wrap(f"{other.label}: {step}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        lines += textwrap.wrap(other.reason, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return lines if plan.runners_up else []


def _loss(plan: Plan, step_us: float) -> str:
    return f" (+{share_text(step_us / plan.step.total - 1)})" if step_us >= plan.step.total > 0 else ""


def _assumptions(plan: Plan) -> list[str]:
    facts = (
        ("device", f"{plan.cluster.device}, {bytes_text(plan.cluster.memory_bytes)} usable"),
        ("profile", plan.profile_digest),
        ("graph", plan.graph_digest),
        ("autoplan", plan.version),
    )
    return ["Assumptions", *pairs_lines([*plan.assumptions, *facts])]
