"""What was measured on the machine itself: times of collectives by size, and of single ops. Looked up before formulas.

In a cluster file, as ``autoplan profile`` writes it::

    [measured]
    date = 2026-12-01
    [measured.machine]                   # where: see ``machine.py``
    torch = "2.13.0"
    [[measured.collectives]]
    kind = "all_reduce"                  # by all such groups at once, each rank computing before it
    ranks = 4
    per_node = 4
    num_bytes = [1024, 1048576]          # as in ``cost.Collective``
    us = [260.0, 2100.0]
    [measured.ops]                       # ``cost.Call`` as text, us
    "aten.gelu.default(%0) float32[8, 64, 512]" = 210.0
"""

import datetime
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from autoplan.cost import Collective, Work
from autoplan.errors import InputError
from autoplan.sharding import CollectiveKind

_KEYS = {"date", "machine", "collectives", "ops"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """Times of one kind of collective by one size of group, over the size of the buffer.

    Between sizes a straight line, below the least one constant, above the largest the last line goes on.
    """

    kind: CollectiveKind
    ranks: int
    per_node: int
    num_bytes: tuple[int, ...]
    us: tuple[float, ...]
    """Never falls with size, and falls per byte: half the bytes take at least half as long."""

    def __post_init__(self) -> None:
        """Refuse what is no curve."""
        points = list(zip(self.num_bytes, self.us, strict=True))
        assert points, "a curve needs a point"
        slack = 1 + 1e-9  # of rounding
        assert all(a < b and t <= u * slack and t / a * slack >= u / b for (a, t), (b, u) in pairwise(points)), (
            f"no curve: {points}"
        )

    def time_us(self, num_bytes: int) -> float:
        """Time of one collective of that size; 0 for no bytes."""
        if num_bytes <= self.num_bytes[0]:
            return self.us[0] if num_bytes else 0.0
        if len(self.us) == 1:
            return self.us[0] * num_bytes / self.num_bytes[0]
        right = min(bisect_left(self.num_bytes, num_bytes), len(self.us) - 1)
        (a, t), (b, u) = ((self.num_bytes[i], self.us[i]) for i in (right - 1, right))
        return t + (u - t) * (num_bytes - a) / (b - a)


def smooth(points: Mapping[int, float]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Times by size as ``CollectiveTimes`` wants them: noise that makes more bytes faster, or dearer each, is cut off.

    A time is lowered to that of any larger size, then to what the sizes below it cost per byte.
    """
    sizes = sorted(points)
    times = [min(points[other] for other in sizes[i:]) for i in range(len(sizes))]
    for i in range(1, len(sizes)):
        times[i] = min(times[i], times[i - 1] * sizes[i] / sizes[i - 1])
    return tuple(sizes), tuple(times)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of one machine; empty where nothing was measured."""

    date: str = ""
    """ISO date of the measurement."""
    machine: tuple[tuple[str, str], ...] = ()
    """What it was measured on and with, as ``machine.describe`` gives it."""
    collectives: tuple[CollectiveTimes, ...] = ()
    ops: tuple[tuple[str, float], ...] = ()
    """``cost.Call`` as text, with its time."""


class Times:
    """``Measured``, indexed once for many questions."""

    def __init__(self, measured: Measured) -> None:
        """Index it."""
        self._ops = dict(measured.ops)
        self._collectives = {(c.kind, c.ranks, c.per_node): c for c in measured.collectives}

    def work_us(self, work: Work) -> float | None:
        """Time of exactly this call; None when it was not measured."""
        return self._ops.get(str(work.call)) if self._ops and work.call is not None else None

    def collective_us(self, collective: Collective) -> float | None:
        """Time of the collective by the curve of its kind and group; None when there is none."""
        group = collective.group
        kind = CollectiveKind.SEND if collective.kind is CollectiveKind.RECV else collective.kind
        message = kind is CollectiveKind.SEND  # between two ranks, however many stand in a line
        size = 2 if message else group.size
        found = self._collectives.get((kind, size, min(size, group.per_node)))
        return found.time_us(collective.num_bytes) if found is not None and group.size > 1 else None


def read_measured(table: object, file: str) -> Measured:
    """The ``[measured]`` table of a cluster file. Raises InputError naming what is wrong."""
    if not isinstance(table, dict) or not set(table) <= _KEYS:
        raise InputError(f"{file}: measured must be a table of {', '.join(sorted(_KEYS))}, found {table!r:.200}")
    date = table.get("date")
    if not isinstance(date, datetime.date):
        raise InputError(f"{file}: measured.date is {date!r}; write a date without quotes: date = 2026-01-31")
    return Measured(
        date=date.isoformat(),
        machine=tuple((name, str(value)) for name, value in _table(table, "machine", file).items()),
        collectives=tuple(_collectives(table.get("collectives", []), file)),
        ops=tuple(
            (name, _us(us, f"measured.ops of {name!r}", file)) for name, us in _table(table, "ops", file).items()
        ),
    )


def _table(table: Mapping[str, object], key: str, file: str) -> dict[str, object]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise InputError(f"{file}: measured.{key} must be a table, found {found!r:.200}")
    return found


def _collectives(entries: object, file: str) -> Iterator[CollectiveTimes]:
    wanted = {"kind", "ranks", "per_node", "num_bytes", "us"}
    kinds = {kind.value: kind for kind in CollectiveKind}
    for entry in entries if isinstance(entries, list) else [entries]:
        if not isinstance(entry, dict) or not wanted <= set(entry) or entry["kind"] not in kinds:
            raise InputError(
                f"{file}: each of measured.collectives needs {', '.join(sorted(wanted))}, and a kind among "
                f"{', '.join(kinds)}; found {entry!r:.200}"
            )
        sizes, times = entry["num_bytes"], entry["us"]
        if not isinstance(sizes, list) or not isinstance(times, list) or len(sizes) != len(times) or not sizes:
            raise InputError(f"{file}: measured.collectives: num_bytes and us must be lists, one time per size")
        where = f"measured.collectives {entry['kind']}"
        points = {_whole(size, where, file): _us(us, where, file) for size, us in zip(sizes, times, strict=True)}
        num_bytes, us = smooth(points)
        ranks, per_node = (_whole(entry[key], where, file) for key in ("ranks", "per_node"))
        yield CollectiveTimes(kind=kinds[entry["kind"]], ranks=ranks, per_node=per_node, num_bytes=num_bytes, us=us)


def _whole(value: object, where: str, file: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{file}: {where}: sizes are whole numbers of at least 1, found {value!r}")
    return value


def _us(value: object, where: str, file: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise InputError(f"{file}: {where}: a time is a positive number of microseconds, found {value!r}")
    return float(value)
