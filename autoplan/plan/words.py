"""Numbers and placements as words, and tables of them; GiB is 2**30."""

import textwrap
from collections.abc import Sequence
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


def count_text(count: int, noun: str) -> str:
    """``1 device``, ``8 devices``."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs folded: ``0-3, 7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


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


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str, wrap: int = 0, indent: int = 2
) -> list[str]:
    """Lines of a table within ``WIDTH`` columns: ``align`` is ``<`` or ``>`` per column, column ``wrap`` may fold."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    rest = indent + sum(widths) - widths[wrap] + 2 * (len(widths) - 1)
    widths[wrap] = min(widths[wrap], max(16, WIDTH - rest))
    lines = []
    for row in [header, ["-" * width for width in widths], *rows]:
        parts = textwrap.wrap(row[wrap], widths[wrap]) or [""]
        for i, part in enumerate(parts):
            cells = [part if j == wrap else cell if i == 0 else "" for j, cell in enumerate(row)]
            padded = [f"{cell:{side}{width}}" for cell, side, width in zip(cells, align, widths, strict=True)]
            lines.append((" " * indent + "  ".join(padded)).rstrip())
    return lines
