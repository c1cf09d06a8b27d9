"""A report as text and as JSON; nothing is computed here but digits."""

import dataclasses
import enum
import json

from autoplan.plan.plan import Plan
from autoplan.plan.words import time_text
from autoplan.plan.writing import json_text
from autoplan.report.report import Report
from autoplan.report.timeline import Pass, Timeline, Window, shown_windows, simulate

_COLUMNS = 96
"""Characters of a row of the timeline."""


def report_text(plan: Plan) -> str:
    """The plan in words, and its timeline where there is a pipeline."""
    if len(plan.stages) == 1:
        return str(plan)
    return f"{plan}\n{timeline_text(simulate(plan))}"


def report_json(report: Report) -> str:
    """The rows and totals as JSON."""
    return json_text(json.loads(json.dumps(dataclasses.asdict(report), default=_enum_value)))


def _enum_value(value: object) -> object:
    assert isinstance(value, enum.Enum), f"a report holds numbers, text and enums, found {value!r}"
    return value.value


def timeline_text(timeline: Timeline) -> str:
    """One row a stage or place: digits are forward passes, letters backward passes of microbatch 0 (a), 1 (b), ..."""
    windows = shown_windows(timeline, least_passes=16)
    shown = " ... ".join(f"{time_text(w.start_us)} to {time_text(w.end_us)}" for w in windows)
    lines = [
        f"Timeline of a step, {shown}",
        "  digits: forward pass of that microbatch; letters: its backward pass (a for 0, b for 1, ...); . waits",
    ]
    if timeline.splits_backward:
        lines.append("  capitals: gradient of the weights")
    for name, passes in zip(timeline.row_names, timeline.passes, strict=True):
        parts = [_row(passes, window, _COLUMNS // len(windows), timeline.end_us) for window in windows]
        lines.append(f"  {name:<9} {' ~ '.join(parts)}")
    return "\n".join(lines) + "\n"


def _row(passes: tuple[Pass, ...], window: Window, columns: int, end_us: float) -> str:
    """What the row does in the middle of each of ``columns`` equal spans."""
    span = (window.end_us - window.start_us) / columns
    cells, remaining = "", iter(passes)
    current = next(remaining, None)
    for column in range(columns):
        now = window.start_us + (column + 0.5) * span
        while current is not None and current.end_us <= now:
            current = next(remaining, None)
        if current is not None and current.start_us <= now:
            cells += _letter(current)
        else:
            cells += "." if now < end_us else "-"
    return cells


def _letter(shown: Pass) -> str:
    digit = shown.microbatch % 10
    letters = {"forward": "0123456789", "backward": "abcdefghij", "weight": "ABCDEFGHIJ"}
    return letters[shown.direction][digit]
