"""What differs between two plans, as text and as JSON."""

import dataclasses
import textwrap
from itertools import groupby

from autoplan.plan.diff import Difference, diff_plans, different_jobs
from autoplan.plan.plan import Plan
from autoplan.plan.words import WIDTH, table, time_text
from autoplan.plan.writing import json_text

_MOST_ROWS = 24
"""Rows of a section that are shown."""


def diff_text(left: Plan, right: Plan, names: tuple[str, str]) -> str:
    """Tables of what differs, a section each; A and B are the files of those names."""
    rows = diff_plans(left, right)
    lines = [f"A  {names[0]}: {_gist(left)}", f"B  {names[1]}: {_gist(right)}", ""]
    if not rows:
        return "\n".join([*lines, "The plans are alike."]) + "\n"
    lines += textwrap.wrap(_comparable(left, right), WIDTH)
    for section, members in groupby(rows, key=lambda row: row.section):
        lines += ["", *_section(section, list(members))]
    return "\n".join(lines) + "\n"


def diff_json(left: Plan, right: Plan) -> str:
    """The same as JSON."""
    rows = [dataclasses.asdict(row) for row in diff_plans(left, right)]
    return json_text({"alike": not rows, "different_jobs": list(different_jobs(left, right)), "differences": rows})


def _gist(plan: Plan) -> str:
    return f"{plan.model} on {plan.cluster}, {plan.batch_size} samples in {time_text(plan.step.total)}"


def _comparable(left: Plan, right: Plan) -> str:
    jobs = different_jobs(left, right)
    if jobs:
        return f"Not the same job: another {' and another '.join(jobs)}. Times and memory below are of different work."
    if left.step.total == right.step.total:
        return "The same job, predicted to take the same time."
    if not left.step.total or not right.step.total:
        return "The same job; one of the plans predicts no time."
    share = right.step.total / left.step.total - 1
    more = "more" if share > 0 else "less"
    return f"The same job: B is predicted to take {abs(100 * share):.1f}% {more} time than A."


def _section(section: str, rows: list[Difference]) -> list[str]:
    changes = any(row.change is not None for row in rows)
    header = (section, "A", "B", *(("B against A",) if changes else ()))
    cells = [(row.name, row.left, row.right, *((_change(row.change),) if changes else ())) for row in rows[:_MOST_ROWS]]
    align = "<>>>" if changes else "<<<"
    more = len(rows) - _MOST_ROWS
    rest = [f"  and {more} more: --json has all of them"] if more > 0 else []
    return [*table(header, cells, align=align, wrap=(0, 1, 2)), *rest]


def _change(change: float | None) -> str:
    return "" if change is None else f"{100 * change:+.1f}%"
