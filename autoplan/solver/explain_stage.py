"""Why a stage begins and ends where it does: what each neighbouring cut would cost, and which limit binds."""

from collections.abc import Iterator

from autoplan.errors import InputError
from autoplan.plan.explanation import Alternative, Explanation
from autoplan.plan.rows import layer_groups
from autoplan.plan.schedule import stages_of
from autoplan.plan.words import bytes_text, share_text, time_text
from autoplan.solver.explain_part import left_open
from autoplan.solver.reprice import Given
from autoplan.solver.step import Step

_TOP = 3
_SAME = 1e-9


def explain_stage(given: Given, number: int) -> Explanation:
    """Why stage ``number`` is as it is. Raises InputError where there is no such stage."""
    count = len(given.plan.stages)
    if not 0 <= number < count:
        raise InputError(f"there is no stage {number}: the plan has stages 0 to {count - 1}")
    moved = [(words, given.step_with(edges=edges)) for words, edges in _moves(given, number)]
    moved.sort(key=lambda pair: (pair[1].overflow_bytes > 0, pair[1].total_us))
    stage = given.plan.stages[number]
    return Explanation(
        subject=f"stage {number}",
        chosen=f"segments {stage.start} to {stage.end - 1} of {len(given.options)}, on place {stage.rank}",
        facts=(*_facts(given, number), ("binds", _binding(given, number, [step for _, step in moved]))),
        step_us=given.step.total_us,
        peak_bytes=given.step.peak_bytes,
        alternatives=tuple(_alternative(given, words, step) for words, step in moved),
        changes=tuple(_changes(given, moved)),
    )


def _moves(given: Given, number: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The cuts around the stage, each moved by one segment, where every stage keeps one."""
    edges = given.edges
    for edge, side, other in ((number, "begins", number - 1), (number + 1, "ends", number + 1)):
        if not 0 < edge < len(edges) - 1:
            continue
        for step, when in ((-1, "earlier"), (1, "later")):
            moved = (*edges[:edge], edges[edge] + step, *edges[edge + 1 :])
            if moved[edge - 1] < moved[edge] < moved[edge + 1]:
                gives = (side == "begins") == (step > 0)
                yield f"{side} one segment {when}: {'gives it to' if gives else 'takes it from'} stage {other}", moved


def _rank_us(step: Step) -> list[float]:
    """One microbatch on every place."""
    point = step.setting.point
    places = (stages_of(point.schedule, point.pp, point.chunks, rank) for rank in range(point.pp))
    return [sum(step.stages[stage].time_us for stage in mine) for mine in places]


def _facts(given: Given, number: int) -> Iterator[tuple[str, str]]:
    plan, step = given.plan, given.step
    stage, cost = plan.stages[number], step.stages[number]
    yield "layers", "; ".join(f"{g.label} (recompute {g.recompute})" for g in layer_groups(plan, stage))
    yield "time", f"{time_text(cost.forward_us)} forward and {time_text(cost.backward_us)} backward a microbatch"
    times = _rank_us(step)
    share = times[stage.rank] / max(times)
    slowest = "the slowest place" if share == 1 else f"{share_text(share)} of the slowest, place {_slowest(times)}"
    yield "place", f"{time_text(times[stage.rank])} a microbatch with all its chunks: {slowest}"
    memory, limit = step.memory[stage.rank], given.tables.cluster.memory_bytes
    causes = sorted(memory, key=lambda pair: -pair[1])[:_TOP]
    most = ", ".join(f"{cause} {bytes_text(amount)}" for cause, amount in causes)
    yield "memory", f"{bytes_text(memory.total)} of {bytes_text(limit)} ({share_text(memory.total / limit)}): {most}"
    yield "sends", f"{time_text(sum(cost.send_us))} a microbatch to its neighbours"


def _binding(given: Given, number: int, moved: list[Step]) -> str:
    """The limit that keeps the cut where it is."""
    step, rank = given.step, given.plan.stages[number].rank
    tighter = [s for s in moved if s.overflow_bytes > 0 and s.total_us < step.total_us]
    if tighter:
        return f"memory: a faster cut beside it is short by {bytes_text(min(s.overflow_bytes for s in tighter))}"
    times = _rank_us(step)
    if times[rank] == max(times):
        return "time: every microbatch waits for this place"
    return f"neither here: the step waits for place {_slowest(times)}"


def _alternative(given: Given, words: str, step: Step) -> Alternative:
    before, after = _rank_us(given.step), _rank_us(step)
    if step.overflow_bytes > 0:
        place = max(range(len(step.memory)), key=lambda rank: step.memory[rank].total)
        reason = f"does not fit: place {place} is short by {bytes_text(step.overflow_bytes)}"
    elif max(after) > max(before) * (1 + _SAME):
        slower = f"{time_text(max(after))} a microbatch, now {time_text(max(before))}"
        reason = f"every microbatch would wait for place {_slowest(after)}: {slower}"
    elif step.total_us < given.step.total_us * (1 - _SAME):
        reason = f"faster: {left_open(given, 1 - step.total_us / given.step.total_us)}"
    else:
        reason = "no faster"
    return Alternative(words=words, step_us=step.total_us, peak_bytes=step.peak_bytes, reason=reason)


def _slowest(times: list[float]) -> int:
    return max(range(len(times)), key=lambda rank: times[rank])


def _changes(given: Given, moved: list[tuple[str, Step]]) -> Iterator[str]:
    for words, step in moved:
        faster = 1 - step.total_us / given.step.total_us
        if step.overflow_bytes > 0 and faster > 0:
            short = bytes_text(step.overflow_bytes)
            yield f"With {short} more memory a device, '{words}' would fit and be {share_text(faster)} faster."
