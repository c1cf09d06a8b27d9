"""Numbers and placements as words, and tables of them; GiB is 2**30."""

import math
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import assert_never

from autoplan.sharding import Partial, Placement, Replicate, Shard

WIDTH = 120


def _three_digits(value: float) -> str:
    decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{decimals}f}"


def time_text(time_us: float) -> str:
    """At most three digits: ``0 us``, ``450 us``, ``12.3 ms``, ``1.20 s``."""
    if not time_us:
        return "0 us"
    if time_us < 999.5:
        return f"{_three_digits(time_us)} us"
    if time_us < 999_500:
        return f"{_three_digits(time_us / 1e3)} ms"
    return f"{_three_digits(time_us / 1e6)} s"


def bytes_text(num_bytes: float) -> str:
    """Three digits: ``512 B``, ``12.5 MiB``, ``76.0 GiB``."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1023.5:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{_three_digits(size)} {unit}"


def rate_text(per_second: float) -> str:
    """A rate: ``3,337``, ``12.5``."""
    return f"{per_second:,.0f}" if per_second >= 99.95 else _three_digits(per_second)


def share_text(share: float) -> str:
    """A share of a whole: ``12.5%``."""
    return f"{100 * share:.1f}%"


def gap_text(gap: float) -> str:
    """A share that something is at most, rounded up so that it stays true: ``0.42%``, ``13%``."""
    percent = 100 * gap
    if percent > 9.99:
        return f"{math.ceil(round(percent, 6))}%"
    return f"{math.ceil(round(100 * percent, 6)) / 100:.2f}%"


def count_text(count: int, noun: str) -> str:
    """``1 device``, ``8 devices``, ``2 copies``."""
    if count == 1:
        return f"{count} {noun}"
    if noun.endswith("y"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith('ch') else 's'}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs folded: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


_MOST_RUNS = 3


def ranks_text(runs: Sequence[range]) -> str:
    """Runs of ranks; many of them by their first two and the last: ``0-7, 32-39, ..., 480-487``."""
    parts = [ranges_text(run) for run in runs]
    return ", ".join(parts if len(parts) <= _MOST_RUNS else [*parts[:2], "...", parts[-1]])


def tensor_words(placement: Placement) -> str:
    """How the tensor axis holds a parameter."""
    match placement:
        case Shard(dim=dim, blocks=1):
            return f"split along dim {dim}"
        case Shard(dim=dim, blocks=blocks):
            return f"split along dim {dim}, within each of its {blocks} blocks"
        case Replicate(partial_grad=True):
            return "whole, gradient summed once a step"
        case Replicate():
            return "whole"
        case Partial():
            return "a part of the sum"
        case _:
            assert_never(placement)


def data_words(placement: Placement) -> str:
    """How the data axis holds a parameter."""
    return "whole" if isinstance(placement, Replicate) else tensor_words(placement)


_NARROWEST = 12


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str, wrap: Sequence[int] = (0,), indent: int = 2
) -> list[str]:
    """Lines of a table within ``WIDTH`` columns: ``align`` is ``<`` or ``>`` per column, columns ``wrap`` may fold."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    _narrow(widths, wrap, WIDTH - indent - 2 * (len(widths) - 1))
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        columns = [textwrap.wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*columns, fillvalue="") if any(columns) else [("",) * len(row)]:
            padded = [f"{part:{side}{width}}" for part, side, width in zip(parts, align, widths, strict=True)]
            lines.append((" " * indent + "  ".join(padded)).rstrip())
    return lines


def _narrow(widths: list[int], wrap: Sequence[int], room: int) -> None:
    """Take what is too much from the widest of the columns that may fold."""
    while sum(widths) > room:
        widest = max(wrap, key=lambda i: widths[i])
        if widths[widest] <= _NARROWEST:
            return
        widths[widest] -= 1
