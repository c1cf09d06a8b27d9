"""Two plans -> what differs between them, section by section, in words. Nothing differs: no rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields

from autoplan.plan.patterns import by_pattern
from autoplan.plan.plan import Amounts, OpPlacement, Plan
from autoplan.plan.rows import layer_groups, outer_numbers, place_memory
from autoplan.plan.summary import batch_words, mesh_words, precision_words, tensor_axis_words, verdict_words
from autoplan.plan.words import bytes_text, count_text, ranges_text, time_text

ABSENT = "-"
"""Stands where one of the plans has nothing of the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which two plans differ."""

    section: str
    name: str
    left: str
    right: str
    change: float | None = None
    """Right against left as a share: 0.1 is 10 % more. None where it is no number, or left is 0."""


def diff_plans(left: Plan, right: Plan) -> tuple[Difference, ...]:
    """Everything in which they differ, the most telling first; parts of the file when it is nothing else."""
    parts = (_jobs, _choices, _stages, _recompute, _weights, _ops, _times, _memory, _collectives, _proofs)
    told = tuple(row for part in parts for row in part(left, right) if row.left != row.right or row.change)
    return told or tuple(_rest(left, right))


def different_jobs(left: Plan, right: Plan) -> tuple[str, ...]:
    """In what the two are not for the same job: ``model``, ``cluster``, ``batch``; their times do not compare then."""
    found = (
        ("model", left.graph_digest != right.graph_digest),
        ("cluster", left.cluster != right.cluster),
        ("batch", left.batch_size != right.batch_size),
    )
    return tuple(name for name, differs in found if differs)


def _jobs(left: Plan, right: Plan) -> Iterator[Difference]:
    facts: tuple[tuple[str, Callable[[Plan], str]], ...] = (
        ("model", lambda plan: plan.model),
        ("graph", lambda plan: plan.graph_digest),
        ("dtype", lambda plan: plan.dtype),
        ("global batch", lambda plan: f"{plan.batch_size} samples"),
        ("tokens in a step", lambda plan: f"{plan.tokens:,}"),
        ("cluster", lambda plan: str(plan.cluster)),
        ("memory of a device", lambda plan: bytes_text(plan.cluster.memory_bytes)),
        ("profile", lambda plan: plan.profile_digest),
        ("autoplan", lambda plan: plan.version),
    )
    yield from _worded("job", facts, left, right)


def _choices(left: Plan, right: Plan) -> Iterator[Difference]:
    facts: tuple[tuple[str, Callable[[Plan], str]], ...] = (
        ("mesh", mesh_words),
        ("schedule", lambda plan: plan.schedule + (f", {plan.chunks} chunks" if plan.chunks > 1 else "")),
        ("data", _data),
        ("tensor", tensor_axis_words),
        ("experts", lambda plan: f"split over {plan.expert} of {plan.data_ranks}" if plan.expert > 1 else ABSENT),
        ("offload", lambda plan: "optimizer states in host memory" if plan.offload else ABSENT),
        ("precision", lambda plan: precision_words(plan) or ABSENT),
        ("batch", batch_words),
    )
    yield from _worded("choice", facts, left, right)


def _data(plan: Plan) -> str:
    over = f"over {plan.shards} of " if plan.data != "replicate" else "on "
    return f"{plan.data} {over}{count_text(plan.data_ranks, 'data rank')}"


def _worded(
    section: str, facts: Iterable[tuple[str, Callable[[Plan], str]]], left: Plan, right: Plan
) -> Iterator[Difference]:
    for name, words in facts:
        yield Difference(section=section, name=name, left=words(left), right=words(right))


def _same_chain(left: Plan, right: Plan) -> bool:
    return left.segment_kinds == right.segment_kinds and left.kind_names == right.kind_names


def _stages(left: Plan, right: Plan) -> Iterator[Difference]:
    """Which layers each stage has, where the cuts differ."""
    cuts = [[(stage.start, stage.end, stage.rank) for stage in plan.stages] for plan in (left, right)]
    if cuts[0] == cuts[1] and _same_chain(left, right):
        return
    yield from _paired("stage", _layers_of_stages(left), _layers_of_stages(right))


def _layers_of_stages(plan: Plan) -> dict[str, str]:
    several = plan.chunks > 1
    found = {}
    for index, stage in enumerate(plan.stages):
        place = f", place {stage.rank}" if several else ""
        runs: dict[str, list[int]] = {}
        for segment in range(stage.start, stage.end):
            kind = plan.segment_kinds[segment]
            runs.setdefault(plan.kind_names[kind], []).append(plan.segment_kinds[:segment].count(kind))
        alone = {name: plan.segment_kinds.count(i) == 1 for i, name in enumerate(plan.kind_names)}
        words = (name if alone[name] else f"{name} {ranges_text(numbers)}" for name, numbers in runs.items())
        found[f"stage {index}"] = ", ".join(words) + place
    return found


def _recompute(left: Plan, right: Plan) -> Iterator[Difference]:
    if _same_chain(left, right):
        yield from _by_layer("recompute", left, right, lambda plan, name: {"": plan.layout(name).recompute})
    else:
        yield from _paired("recompute", _recompute_of(left), _recompute_of(right))


def _recompute_of(plan: Plan) -> dict[str, str]:
    return {group.label: group.recompute for stage in plan.stages for group in layer_groups(plan, stage)}


def _ops(left: Plan, right: Plan) -> Iterator[Difference]:
    """Strategies of the ops of a layer, on the axes that both plans have."""
    if _same_chain(left, right):
        yield from _by_layer("op", left, right, _strategies)


def _strategies(plan: Plan, layout: str) -> dict[str, str]:
    return {op.node: _strategy(op) for op in plan.layout(layout).ops}


def _strategy(op: OpPlacement) -> str:
    context = f"; cp: {op.context}" if op.context is not None else ""
    return f"tp: {op.tensor}; dp: {op.batch}{context}"


def _by_layer(
    section: str, left: Plan, right: Plan, facts: Callable[[Plan, str], Mapping[str, str]]
) -> Iterator[Difference]:
    """Facts of a layout that differ, with all the layers for which they differ alike."""
    names = [[name for stage in plan.stages for name in stage.layouts] for plan in (left, right)]
    segments: dict[tuple[str, str], list[int]] = {}
    for segment, pair in enumerate(zip(*names, strict=True)):
        segments.setdefault(pair, []).append(segment)
    layers: dict[tuple[int, str, str, str], list[int]] = {}
    for (a, b), found in segments.items():
        mine, theirs = facts(left, a), facts(right, b)
        for name in dict.fromkeys((*mine, *theirs)):
            values = mine.get(name, ABSENT), theirs.get(name, ABSENT)
            if values[0] != values[1]:
                for segment in found:
                    layers.setdefault((left.segment_kinds[segment], name, *values), []).append(segment)
    for (kind, name, mine_text, their_text), found in layers.items():
        label = _label(left, kind, sorted(found)) + (f": {name}" if name else "")
        yield Difference(section=section, name=label, left=mine_text, right=their_text)


def _label(plan: Plan, kind: int, segments: list[int]) -> str:
    numbers = [plan.segment_kinds[:segment].count(kind) for segment in segments]
    alone = plan.segment_kinds.count(kind) == 1
    return plan.kind_names[kind] + ("" if alone else f" {ranges_text(numbers)}")


def _weights(left: Plan, right: Plan) -> Iterator[Difference]:
    """How weights are held, folded over the layers that differ alike."""
    mine, theirs = _held(left), _held(right)
    for pattern, names in by_pattern(tuple(dict.fromkeys((*mine, *theirs)))).items():
        pairs: dict[tuple[str, str], list[str]] = {}
        for name in names:
            pairs.setdefault(_apart(mine.get(name), theirs.get(name)), []).append(name)
        for (a, b), members in pairs.items():
            name = members[0] if len(members) == 1 else pattern
            if 1 < len(members) < len(names):
                name += f", layers {ranges_text(outer_numbers(members))}"
            yield Difference(section="weight", name=name, left=a, right=b)


_Held = tuple[tuple[str, str], ...]
_NO_WEIGHT = (("weight", "absent"),)


def _held(plan: Plan) -> dict[str, _Held]:
    return {p.name: (("tp", str(p.tensor)), ("dp", str(p.data)), ("ep", str(p.expert))) for p in plan.params}


def _apart(left: _Held | None, right: _Held | None) -> tuple[str, str]:
    """The axes on which two weights are held otherwise, in words."""
    if left is None or right is None:
        return _words(left or _NO_WEIGHT), _words(right or _NO_WEIGHT)
    differ = [(a, b) for a, b in zip(left, right, strict=True) if a != b]
    return _words(a for a, _ in differ), _words(b for _, b in differ)


def _words(held: Iterable[tuple[str, str]]) -> str:
    return "; ".join(f"{axis}: {placement}" for axis, placement in held)


def _times(left: Plan, right: Plan) -> Iterator[Difference]:
    yield from _amounts("time", left.step, right.step, time_text)


def _memory(left: Plan, right: Plan) -> Iterator[Difference]:
    """By place on the pp axis and cause."""
    places = place_memory(left), place_memory(right)
    nothing = Amounts(by_cause=())
    for place in range(max(map(len, places))):
        a, b = (found[place] if place < len(found) else nothing for found in places)
        yield from _amounts("memory", a, b, bytes_text, f"stage {place}" if _single(left, right) else f"place {place}")


def _single(left: Plan, right: Plan) -> bool:
    return left.chunks == right.chunks == 1


def _amounts(
    section: str, left: Amounts, right: Amounts, digits: Callable[[float], str], prefix: str = ""
) -> Iterator[Difference]:
    mine = {**dict(left), "total": left.total}
    theirs = {**dict(right), "total": right.total}
    causes = [cause for cause in dict.fromkeys((*mine, *theirs)) if cause != "total"]
    for cause in (*causes, "total"):
        a, b = mine.get(cause, 0.0), theirs.get(cause, 0.0)
        if a != b:
            yield Difference(
                section=section,
                name=f"{prefix}: {cause}" if prefix else cause,
                left=digits(a),
                right=digits(b),
                change=b / a - 1 if a else None,
            )


def _collectives(left: Plan, right: Plan) -> Iterator[Difference]:
    """What one rank of each stage sends in a step, added up over the stages."""
    mine, theirs = _sent(left), _sent(right)
    for key in dict.fromkeys((*mine, *theirs)):
        a, b = mine.get(key, (0, 0)), theirs.get(key, (0, 0))
        if a != b:
            change = b[1] / a[1] - 1 if a[1] else None
            yield Difference(section="collective", name=key, left=_sent_words(a), right=_sent_words(b), change=change)


def _sent(plan: Plan) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for stage in plan.stages:
        for c in stage.collectives:
            key = f"{c.axis} {c.kind.value}"
            count, num_bytes = found.get(key, (0, 0))
            found[key] = count + c.count, num_bytes + c.num_bytes
    return found


def _sent_words(sent: tuple[int, int]) -> str:
    return f"{sent[0]:,}, {bytes_text(sent[1])}" if sent[0] else ABSENT


def _proofs(left: Plan, right: Plan) -> Iterator[Difference]:
    yield Difference(section="proof", name="answer", left=verdict_words(left), right=verdict_words(right))
    yield from _paired("assumption", _assumed(left), _assumed(right))


def _assumed(plan: Plan) -> dict[str, str]:
    """Assumptions by name; those of one name are joined."""
    found: dict[str, list[str]] = {}
    for name, text in plan.assumptions:
        found.setdefault(name, []).append(text)
    return {name: "; ".join(texts) for name, texts in found.items()}


def _paired(section: str, left: Mapping[str, str], right: Mapping[str, str]) -> Iterator[Difference]:
    for name in dict.fromkeys((*left, *right)):
        yield Difference(section=section, name=name, left=left.get(name, ABSENT), right=right.get(name, ABSENT))


def _rest(left: Plan, right: Plan) -> Iterator[Difference]:
    for name in (field.name for field in fields(Plan)):
        if getattr(left, name) != getattr(right, name):
            yield Difference(section="part of the file", name=name, left="as here", right="other")
