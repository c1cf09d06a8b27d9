"""The plan in words: stable plain text of at most 120 columns, for people and golden tests."""

import textwrap
from collections.abc import Sequence

from autoplan.plan.plan import Plan, Stage
from autoplan.plan.rows import layer_groups, stage_ranks, tied_across_stages, weight_groups
from autoplan.plan.words import (
    WIDTH,
    bytes_text,
    count_text,
    data_words,
    ranges_text,
    rate_text,
    share_text,
    table,
    tensor_words,
    time_text,
)
from autoplan.sharding import Shard

_STAGES_ABREAST = 6
"""Columns of the memory table before it starts anew below."""


def plan_text(plan: Plan) -> str:
    """Mesh, stages, weights, predicted time and memory, what lost, and all assumptions."""
    sections = (
        _summary(plan),
        _stages(plan),
        _weights(plan),
        _step(plan),
        _memory(plan),
        _collectives(plan),
        _runners_up(plan),
        _assumptions(plan),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Name and text in two columns, the text wrapped."""
    width = max(len(name) for name, _ in pairs) + 2
    lines = []
    for name, text in pairs:
        indent = " " * (width + 2)
        wrapped = textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
        lines.append(f"  {name}" + wrapped[len(name) + 2 :])
    return lines


def _summary(plan: Plan) -> list[str]:
    pp, dp, tp = plan.mesh.sizes
    total = plan.step.total
    rate = f", {rate_text(plan.batch_size / total * 1e6)} samples/s" if total else ""
    headline = f"Plan for {plan.model} on {plan.cluster}"
    return [*textwrap.wrap(headline, WIDTH), *_pairs([
        ("step", f"{time_text(total)} predicted{rate}"),
        ("mesh", f"pp {pp} x dp {dp} x tp {tp} = {count_text(plan.mesh.num_devices, 'device')}"),
        ("pipeline", pipeline_words(plan)),
        ("data", data_axis_words(plan)),
        ("tensor", tensor_axis_words(plan)),
        ("batch", f"{plan.batch_size} samples = dp {dp} x {count_text(plan.num_microbatches, 'microbatch')} of "
                  f"{plan.batch_size // plan.parts}"),
        ("tied", _tied_words(plan)),
    ])]  # fmt: skip


def pipeline_words(plan: Plan) -> str:
    """What happens along pp."""
    pp = plan.mesh.size("pp")
    if pp == 1:
        return "one stage" + (", gradients accumulated over the microbatches" if plan.num_microbatches > 1 else "")
    return f"{pp} stages, schedule 1F1B (a backward pass follows each forward pass once the pipeline is full)"


def data_axis_words(plan: Plan) -> str:
    """What happens along dp."""
    dp = plan.mesh.size("dp")
    if dp == 1:
        return "one replica"
    if plan.data == "shard":
        return f"parameters, gradients and optimizer states are split over {dp} replicas (FSDP2)"
    return f"{dp} whole replicas, gradients summed once a step"


def tensor_axis_words(plan: Plan) -> str:
    """What happens along tp."""
    tp = plan.mesh.size("tp")
    if tp == 1:
        return "no split"
    crossing = {placement for stage in plan.stages for name in stage.layouts for placement in plan.layout(name).inputs}
    sequence = ", activations between layers along dim 1 (sequence)" if Shard(1) in crossing else ""
    strategies = [op.tensor for layout in plan.layouts for op in layout.ops]
    if not any(isinstance(p, Shard) for s in strategies for p in (*s.inputs, *s.outputs)):
        return f"nothing is split at this size: {count_text(tp, 'device')} do the same work"
    return f"each layer is split over {count_text(tp, 'device')}{sequence}"


def _tied_words(plan: Plan) -> str:
    tied = tied_across_stages(plan)
    if not tied:
        return "no parameter lives on more than one stage"
    return f"{', '.join(tied)}: a copy on each stage that uses it, gradients summed once a step"


def _stages(plan: Plan) -> list[str]:
    rows = []
    for index, stage in enumerate(plan.stages):
        for position, group in enumerate(layer_groups(plan, stage)):
            facts = _stage_facts(plan, index, stage) if position == 0 else ("",) * 6
            rows.append((*facts[:2], group.label, group.recompute, group.layout, *facts[2:]))
    header = ("stage", "ranks", "layers", "recompute", "layout", "forward", "backward", "memory", "of limit")
    note = "  forward and backward: one microbatch, communication included"
    return ["Stages", *table(header, rows, align=">><<<>>>>", wrap=2), note]


def _stage_facts(plan: Plan, index: int, stage: Stage) -> tuple[str, ...]:
    first, last = stage_ranks(plan, index)
    used = stage.memory.total
    return (
        str(index),
        ranges_text(range(first, last + 1)),
        time_text(stage.forward_us),
        time_text(stage.backward_us),
        bytes_text(used),
        share_text(used / plan.cluster.memory_bytes),
    )


def _weights(plan: Plan) -> list[str]:
    if not plan.params:
        return []
    rows = [
        (
            group.label,
            str(group.count),
            ranges_text(group.stages),
            tensor_words(group.tensor) if plan.mesh.size("tp") > 1 else "-",
            data_words(group.data) if plan.mesh.size("dp") > 1 else "-",
        )
        for group in weight_groups(plan)
    ]
    header = ("weight", "count", "stage", f"over tp {plan.mesh.size('tp')}", f"over dp {plan.mesh.size('dp')}")
    return ["Weights", *table(header, rows, align="<>><<")]


def _step(plan: Plan) -> list[str]:
    total = plan.step.total
    rows = [(cause, time_text(amount), share_text(amount / total if total else 0)) for cause, amount in plan.step]
    rows.append(("total", time_text(total), share_text(1)))
    return ["Predicted time of a training step", *table(("cause", "time", "share"), rows, align="<>>")]


def _memory(plan: Plan) -> list[str]:
    lines = ["Predicted peak memory of a device, by stage"]
    for start in range(0, len(plan.stages), _STAGES_ABREAST):
        lines += _memory_table(plan, range(start, min(start + _STAGES_ABREAST, len(plan.stages))))
    return lines


def _memory_table(plan: Plan, part: range) -> list[str]:
    amounts = [dict(plan.stages[index].memory) for index in part]
    causes = dict.fromkeys(cause for amount in amounts for cause in amount)
    rows = [[cause, *(bytes_text(amount.get(cause, 0)) for amount in amounts)] for cause in causes]
    limit = plan.cluster.memory_bytes
    totals = [plan.stages[index].memory.total for index in part]
    rows.append(["total", *map(bytes_text, totals)])
    rows.append(["limit", *(bytes_text(limit) for _ in part)])
    rows.append(
        ["free", *(bytes_text(limit - t) if t <= limit else f"over by {bytes_text(t - limit)}" for t in totals)]
    )
    return table(["cause", *(f"stage {index}" for index in part)], rows, align="<" + ">" * len(part))


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
    return ["What one rank sends and receives in a step", *table(header, rows, align="<<>><", wrap=4)]


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
    return ["Assumptions", *_pairs([*plan.assumptions, *facts])]
