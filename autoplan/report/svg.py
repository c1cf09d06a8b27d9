"""The report's pictures as inline SVG: the step's timeline, and stacked bars.

Hand-made rather than by a plotting library: a few kilobytes instead of four megabytes per report, real text that a
screen reader and a search find, colours that follow the page's light or dark mode, and no script to run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from autoplan.plan.words import bytes_text, time_text
from autoplan.report.report import Report, Share
from autoplan.report.timeline import Pass, Timeline, Window, shown_windows

_WIDTH = 1000
_LEFT = 78
"""Room for the names of the rows."""
_GAP = 34
"""Between two windows of the timeline."""
_ROW = 30
_BAR = 22


def timeline_svg(timeline: Timeline) -> str:
    """One row a stage or place, time to the right; a long step shows its beginning and its end.

    Stages of one place differ in shade, the first the darkest.
    """
    windows = shown_windows(timeline)
    axes = _axes(windows)
    height = _ROW * len(timeline.passes) + 34
    parts = [_labels(timeline.row_names)]
    for axis in axes:
        for row, passes in enumerate(timeline.passes):
            parts.extend(_track(axis, row, passes, timeline))
        parts.extend(_ticks(axis, height))
    if len(axes) > 1:
        middle = axes[0].right + _GAP / 2
        parts.append(f'<text class="gap" x="{middle:.1f}" y="{(height - 34) / 2 + 4:.1f}">...</text>')
    return _svg("timeline", height, "Timeline of one training step", _timeline_words(timeline), parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """A window of time laid from ``left`` to ``right``."""

    window: Window
    left: float
    right: float

    def x(self, time_us: float) -> float:
        """Where a time lies, kept within the window."""
        start, end = self.window.start_us, self.window.end_us
        share = (time_us - start) / (end - start) if end > start else 0.0
        return self.left + (self.right - self.left) * min(1.0, max(0.0, share))


def _axes(windows: tuple[Window, ...]) -> tuple[_Axis, ...]:
    """All windows to one scale, side by side."""
    room = _WIDTH - _LEFT - _GAP * (len(windows) - 1) - 8
    total = sum(w.end_us - w.start_us for w in windows)
    axes, left = [], float(_LEFT)
    for window in windows:
        right = left + (room * (window.end_us - window.start_us) / total if total else room)
        axes.append(_Axis(window=window, left=left, right=right))
        left = right + _GAP
    return tuple(axes)


def _track(axis: _Axis, row: int, passes: tuple[Pass, ...], timeline: Timeline) -> Iterator[str]:
    y = row * _ROW + 4
    yield _rect("idle", axis.left, axis.right, y)
    for shown in passes:
        if shown.end_us > axis.window.start_us and shown.start_us < axis.window.end_us:
            yield from _pass(axis, y, shown, 1 - 0.4 * shown.chunk / max(1, timeline.chunks - 1))
    start, end = axis.x(timeline.end_us), axis.x(timeline.step_us)
    if end - start > 0.5:
        rest = time_text(timeline.step_us - timeline.end_us)
        yield _rect("after", start, end, y, f"after the pipeline: gradient reduction, optimizer, {rest}")


def _pass(axis: _Axis, y: float, shown: Pass, opacity: float) -> Iterator[str]:
    left, right = axis.x(shown.start_us), axis.x(shown.end_us)
    span = f"{time_text(shown.start_us)} to {time_text(shown.end_us)}"
    what = "gradient of weights" if shown.direction == "weight" else shown.direction
    words = f"stage {shown.stage}, microbatch {shown.microbatch}, {what}, {span}"
    yield _rect(shown.direction, left, right, y, words, opacity)
    label = str(shown.microbatch)
    if right - left > 7 * len(label) + 4:
        yield f'<text class="in" x="{(left + right) / 2:.1f}" y="{y + 15.5:.1f}">{label}</text>'


def _ticks(axis: _Axis, height: float) -> Iterator[str]:
    count = max(1, int((axis.right - axis.left) // 150))
    start, end = axis.window.start_us, axis.window.end_us
    y = height - 34
    for i in range(count + 1):
        time_us = start + (end - start) * i / count
        x = axis.x(time_us)
        anchor = "start" if i == 0 else "end" if i == count else "middle"
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{y:.1f}" y2="{y + 6:.1f}"/>'
        yield f'<text class="axis" text-anchor="{anchor}" x="{x:.1f}" y="{y + 21:.1f}">{time_text(time_us)}</text>'


def _timeline_words(timeline: Timeline) -> str:
    idle = "; ".join(
        f"{name} runs {len(passes)} passes and waits {time_text(timeline.idle_us(row))}"
        for row, (name, passes) in enumerate(zip(timeline.row_names, timeline.passes, strict=True))
    )
    return f"The step takes {time_text(timeline.step_us)}, its pipeline {time_text(timeline.end_us)}. {idle}."


def memory_svg(report: Report) -> str:
    """One bar a place on the pp axis, stacked by cause, and the limit of a device as a line."""
    limit = report.places[0].limit_bytes
    most = max(limit, *(row.memory_bytes for row in report.places)) * 1.04
    scale = (_WIDTH - _LEFT - 90) / most
    causes = list(dict.fromkeys(part.cause for row in report.places for part in row.memory))
    height = _ROW * len(report.places) + 28
    name = "place" if report.chunks > 1 else "stage"
    parts = [_labels([f"{name} {row.place}" for row in report.places])]
    for index, row in enumerate(report.places):
        y = index * _ROW + 4
        parts.extend(_stack(row.memory, causes, y, scale, bytes_text))
        used = bytes_text(row.memory_bytes)
        parts.append(f'<text class="axis" text-anchor="end" x="{_WIDTH}" y="{y + 15.5:.1f}">{used}</text>')
    x, bottom = _LEFT + limit * scale, height - 24
    parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom:.1f}"/>')
    text = f'<text class="axis" text-anchor="end" x="{x:.1f}" y="{height - 8:.1f}">limit {bytes_text(limit)}</text>'
    used_of = [f"{r.place}: {bytes_text(r.memory_bytes)} of {bytes_text(limit)}" for r in report.places]
    words = ". ".join(f"{name.capitalize()} {used}" for used in used_of)
    return _svg("memory", height, f"Peak memory of a device, by {name} and cause", words, [*parts, text])


def step_svg(report: Report) -> str:
    """The step's time as one bar, stacked by cause."""
    scale = (_WIDTH - _LEFT - 90) / report.step_us if report.step_us else 0.0
    causes = [part.cause for part in report.step]
    parts = [_labels(["step"]), *_stack(report.step, causes, 4, scale, time_text)]
    x = _LEFT + report.step_us * scale + 6
    parts.append(f'<text class="axis" x="{x:.1f}" y="19.5">{time_text(report.step_us)}</text>')
    words = ", ".join(f"{part.cause} {time_text(part.amount)}" for part in report.step)
    return _svg("step", _ROW, "Time of a training step by cause", words, parts)


def legend(causes: Sequence[str]) -> str:
    """The colours of stacked bars; a cause has the colour of its place."""
    keys = "".join(f'<li><span class="key c{i % 10}"></span>{escape(c)}</li>' for i, c in enumerate(causes))
    return f'<ul class="legend">{keys}</ul>'


def _stack(
    shares: tuple[Share, ...], causes: Sequence[str], y: float, scale: float, digits: Callable[[float], str]
) -> Iterator[str]:
    left = float(_LEFT)
    for part in shares:
        right = left + part.amount * scale
        yield _rect(f"c{causes.index(part.cause) % 10}", left, right, y, f"{part.cause}: {digits(part.amount)}")
        left = right


def _rect(css: str, left: float, right: float, y: float, words: str = "", opacity: float = 1.0) -> str:
    title = f"<title>{escape(words)}</title>" if words else ""
    width = max(0.0, right - left)
    shade = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
    return f'<rect class="{css}" x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}"{shade}>{title}</rect>'


def _labels(names: Sequence[str]) -> str:
    return "".join(f'<text class="row" x="0" y="{i * _ROW + 19.5:.1f}">{escape(n)}</text>' for i, n in enumerate(names))


def _svg(name: str, height: float, title: str, words: str, parts: Sequence[str]) -> str:
    return (
        f'<svg id="{name}" class="chart" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" '
        f'aria-labelledby="{name}-title {name}-words">'
        f'<title id="{name}-title">{escape(title)}</title><desc id="{name}-words">{escape(words)}</desc>'
        f"{''.join(parts)}</svg>"
    )
