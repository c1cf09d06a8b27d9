"""Explanations, checks and plans priced elsewhere as text and JSON; nothing is computed here but digits."""

import dataclasses
import textwrap
from collections.abc import Sequence

from autoplan.plan.diff import Difference, diff_plans
from autoplan.plan.explanation import Alternative, Check, Explanation
from autoplan.plan.plan import Plan
from autoplan.plan.rows import place_memory
from autoplan.plan.text import pairs_lines
from autoplan.plan.words import WIDTH, bytes_text, share_text, table, time_text
from autoplan.plan.writing import json_text


def explanation_text(found: Explanation) -> str:
    """The part, the alternatives with their price, and what would change the choice."""
    lines = [*textwrap.wrap(found.subject, WIDTH), *pairs_lines([("chosen", found.chosen), *found.facts])]
    if found.alternatives:
        plan = ("as in the plan", time_text(found.step_us), "", bytes_text(found.peak_bytes), "")
        rows = [plan, *(_alternative(other, found.step_us) for other in found.alternatives)]
        header = ("choice", "step", "change", "memory", "why not")
        lines += ["", f"Alternatives, {found.terms}", *table(header, rows, align="<>>><", wrap=(0, 4))]
    if found.changes:
        lines += ["", "What would change the choice"]
        for change in found.changes:
            lines += textwrap.wrap(change, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def _alternative(other: Alternative, step_us: float) -> tuple[str, ...]:
    if other.step_us is None:
        return (other.words, "cannot be", "", "", other.reason)
    change = f"{100 * (other.step_us / step_us - 1):+.1f}%" if step_us else ""
    memory = "" if other.peak_bytes is None else bytes_text(other.peak_bytes)
    return (other.words, time_text(other.step_us), change, memory, other.reason)


def explanations_json(found: Sequence[Explanation]) -> str:
    """Several of them as a list in JSON."""
    return json_text([dataclasses.asdict(each) for each in found])


def check_text(found: Check) -> str:
    """Legal or not, fits or not, runs or not: each with the reasons."""
    lines = [*textwrap.wrap(f"Plan for {found.model} on {found.cluster}", WIDTH)]
    pairs = [("legal", "yes" if not found.illegal else f"no: {found.illegal[0]}")]
    pairs += [("", problem) for problem in found.illegal[1:]]
    if not found.illegal:
        pairs += [("fits", _fits(found)), *_over(found)]
        pairs.append(("step", "unknown" if found.step_us is None else f"{time_text(found.step_us)} predicted"))
    if found.figures:
        pairs.append(("figures", found.figures))
    pairs.append(("runs", f"not yet: {'; '.join(found.cannot_run)}" if found.cannot_run else "yes"))
    lines += pairs_lines(pairs)
    if found.degrees:
        lines += ["", "Valid degrees for this model, cluster and batch", *pairs_lines(found.degrees)]
    return "\n".join(lines) + "\n"


def _fits(found: Check) -> str:
    limit = found.cluster.memory_bytes
    place = max(range(len(found.memory)), key=lambda i: found.memory[i].total)
    most = found.memory[place].total
    used = f"stage {place} is the fullest: {bytes_text(most)} of {bytes_text(limit)} ({share_text(most / limit)})"
    return f"no: {used}" if found.over else f"yes: {used}"


def _over(found: Check) -> list[tuple[str, str]]:
    """What every stage that does not fit is short of, and the most of what it needs it for."""
    lines = []
    for place in found.over:
        memory = found.memory[place]
        causes = sorted(memory, key=lambda pair: -pair[1])[:3]
        needs = ", ".join(f"{cause} {bytes_text(amount)}" for cause, amount in causes)
        short = bytes_text(memory.total - found.cluster.memory_bytes)
        lines.append(("", f"stage {place} is short by {short}: {needs}"))
    return lines


def check_json(found: Check) -> str:
    """The same as JSON."""
    return json_text({**dataclasses.asdict(found), "over": list(found.over), "good": found.good})


_PRICED = ("job", "choice", "time", "memory", "collective", "assumption")


def recost_text(before: Plan, after: Plan) -> str:
    """A plan as it was searched (A) and priced elsewhere (B): step, memory, and what changed."""
    lines = [f"A  as searched: {_gist(before)}", f"B  priced anew: {_gist(after)}"]
    rows = [row for row in diff_plans(before, after) if row.section in _PRICED]
    if not rows:
        return "\n".join([*lines, "", "Nothing changes."]) + "\n"
    for section in dict.fromkeys(row.section for row in rows):
        lines += ["", *_changes(section, [row for row in rows if row.section == section])]
    return "\n".join(lines) + "\n"


def recost_json(before: Plan, after: Sequence[Plan]) -> str:
    """The same as a list in JSON, one entry per plan priced elsewhere."""
    return json_text([
        {
            "cluster": str(plan.cluster),
            "batch_size": plan.batch_size,
            "step_us": plan.step.total,
            "memory_bytes": [memory.total for memory in place_memory(plan)],
            "limit_bytes": plan.cluster.memory_bytes,
            "fits": max(memory.total for memory in place_memory(plan)) <= plan.cluster.memory_bytes,
            "differences": [
                dataclasses.asdict(row) for row in diff_plans(before, plan) if row.section in _PRICED
            ],
        }
        for plan in after
    ])  # fmt: skip


def _gist(plan: Plan) -> str:
    most, limit = max(memory.total for memory in place_memory(plan)), plan.cluster.memory_bytes
    fits = "fits" if most <= limit else f"does not fit, short by {bytes_text(most - limit)}"
    return (
        f"{plan.cluster}, {plan.batch_size} samples in {time_text(plan.step.total)}, {bytes_text(most)} of "
        f"{bytes_text(limit)}: {fits}"
    )


def _changes(section: str, rows: list[Difference]) -> list[str]:
    cells = [(row.name, row.left, row.right, "" if row.change is None else f"{100 * row.change:+.1f}%") for row in rows]
    return table((section, "A", "B", "B against A"), cells, align="<>>>", wrap=(0, 1, 2))
