"""Why a degree, a schedule or another choice of the whole plan is as it is: each other value, searched."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.errors import InfeasibleError, InputError
from autoplan.ir import SegmentedGraph
from autoplan.plan.explanation import Alternative, Explanation
from autoplan.plan.plan import DATA_MODES, RECOMPUTE, SCHEDULES, Plan, Recompute
from autoplan.plan.words import share_text, time_text
from autoplan.solver.constraints import Value
from autoplan.solver.experts import num_experts
from autoplan.solver.mesh import divisors
from autoplan.solver.points import LARGEST_MICROBATCH
from autoplan.solver.reprice import Given
from autoplan.solver.request import Request
from autoplan.solver.search import search
from autoplan.solver.solve import prepare
from autoplan.solver.state import Search
from autoplan.solver.step import Step
from autoplan.solver.tables import Tables

CHOICES = ("pp", "dp", "cp", "tp", "ep", "schedule", "microbatch", "data", "recompute")
"""What can be asked for."""
_OVERTIME = 3.0
"""Times the time limit after which a search that has found nothing is given up."""
_GAP = 0.01
_ONE = 1e-4


class _GivenUpError(Exception):
    """Nothing was found in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which choice, of which plan, for which job."""

    name: str
    given: Given
    sg: SegmentedGraph
    """As traced."""
    request: Request
    """As the plan was searched, with its pins."""
    progress: Callable[[str], None]
    limit_s: float
    """For each value."""
    tables: dict[tuple[Recompute, ...], Tables] = field(default_factory=dict)
    """By the ways to recompute: what searches for several values share."""


def explain_choice(
    given: Given, sg: SegmentedGraph, request: Request, name: str, time_limit_s: float, progress: Callable[[str], None]
) -> Explanation:
    """Search the best plan with every other value of a choice; what the user pinned else stays."""
    chosen = chosen_value(given.plan, name)
    others = [value for value in _values(given, sg, name) if value != chosen]
    asked = Question(
        name=name, given=given, sg=sg, request=request, progress=progress, limit_s=time_limit_s / max(1, len(others))
    )
    found = [_searched(asked, value) for value in others]
    found.sort(key=lambda other: (other.step_us is None, other.step_us or 0.0))
    return Explanation(
        subject=name,
        chosen=str(chosen),
        facts=tuple(_facts(given, request, name)),
        step_us=given.step.total_us,
        peak_bytes=given.step.peak_bytes,
        alternatives=tuple(found),
        changes=(),
        terms="all else searched anew",
    )


def chosen_value(plan: Plan, name: str) -> Value:
    """What the plan has."""
    match name:
        case "pp" | "dp" | "cp" | "tp":
            return plan.mesh.size(name)
        case "ep":
            return plan.expert
        case "microbatch":
            return plan.batch_size // plan.parts
        case "recompute":
            used = {plan.layout(layout).recompute for stage in plan.stages for layout in stage.layouts}
            return "/".join(way for way in RECOMPUTE if way in used)
        case _:
            value: Value = getattr(plan, name)
            return value


def _values(given: Given, sg: SegmentedGraph, name: str) -> tuple[Value, ...]:
    """What might be, whether it can be or not."""
    cluster = given.tables.cluster
    match name:
        case "tp":
            return divisors(cluster.devices_per_node)
        case "pp" | "dp" | "cp":
            return divisors(cluster.num_devices)
        case "ep":
            return divisors(num_experts(sg) or 1)
        case "microbatch":
            return tuple(size for size in divisors(sg.graph.batch_size) if size <= LARGEST_MICROBATCH)
        case "schedule":
            return SCHEDULES
        case "data":
            return DATA_MODES
        case _:
            return RECOMPUTE


def _facts(given: Given, request: Request, name: str) -> Iterator[tuple[str, str]]:
    pinned = dict(request.pinned)
    yield "pinned", f"by the user: {name}={pinned[name]}" if name in pinned else "no: the search chose it"
    rest = ", ".join(f"{key}={value}" for key, value in request.pinned if key != name)
    if rest:
        yield "kept", f"what else is pinned: {rest}"


def _searched(asked: Question, value: Value) -> Alternative:
    """The best plan with this value, or why there is none."""
    words = f"{asked.name}={value}"
    asked.progress(f"searching with {words}")
    wanted: dict[str, Any] = {asked.name: value}
    gap = max(asked.request.gap, _GAP)
    pinned = replace(asked.request, **wanted, top=1, gap=gap, time_limit_s=asked.limit_s)
    try:
        state = _search(asked, pinned)
    except InputError as error:
        return Alternative(words=words, step_us=None, peak_bytes=None, reason=str(error))
    except InfeasibleError as error:
        return Alternative(words=words, step_us=None, peak_bytes=None, reason=str(error).partition("\n")[0])
    except _GivenUpError:
        return _bounded(asked, words)
    if state.best is None:
        reasons = [reason for reason, _ in sorted(state.refusals.items(), key=lambda pair: (-pair[1], pair[0]))]
        reason = reasons[0] if reasons else "no mesh of these devices and this batch has it"
        return Alternative(words=words, step_us=None, peak_bytes=None, reason=reason)
    return _alternative(asked, words, state.best, state.status == "complete")


def _search(asked: Question, pinned: Request) -> Search:
    """A search that shares its tables with those before it, and ends some time after its limit in any case."""
    given, end = asked.given, time.monotonic() + _OVERTIME * asked.limit_s

    def say(message: str) -> None:
        if time.monotonic() > end:
            raise _GivenUpError
        asked.progress(f"{asked.name}: {message}")

    tables, space = prepare(asked.sg, given.tables.cluster, given.tables.cost, pinned)
    return search(asked.tables.setdefault(tables.recompute, tables), space, pinned, say)


def _alternative(asked: Question, words: str, step: Step, is_complete: bool) -> Alternative:
    point = re.sub(rf"\b{asked.name}=\d+ |(?: |^){asked.name}=\d+(?=,)", "", str(step.setting.point))
    mine = dict(asked.given.step.amounts)
    cause, most = max(((c, amount - mine.get(c, 0.0)) for c, amount in step.amounts), key=lambda pair: pair[1])
    share = step.total_us / asked.given.step.total_us - 1
    if share < -_ONE:
        reason = f"{share_text(-share)} faster: the search that made the plan left it open or was told otherwise"
    elif share <= _ONE:
        reason = "as fast"
    else:
        reason = f"{time_text(most)} more {cause}"
    early = "" if is_complete else "; best found in time"
    return Alternative(
        words=f"{words}: {point}", step_us=step.total_us, peak_bytes=step.peak_bytes, reason=reason + early
    )


def _bounded(asked: Question, words: str) -> Alternative:
    """Nothing was found in time: what the search that made the plan knew of it."""
    known = [r for r in asked.given.plan.runners_up if r.step_us is not None and words in re.split(r"[ ,]+", r.label)]
    reason = "nothing was found in time; raise --time-limit"
    if known:
        best = min(known, key=lambda runner: runner.step_us or 0.0)
        reason += f" (the search that made the plan says of {best.label}: {best.reason})"
    return Alternative(words=words, step_us=None, peak_bytes=None, reason=reason)
