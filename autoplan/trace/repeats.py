"""The repetition in a sequence of labels that covers most of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """``count`` >= 2 equal stretches of ``period`` items, the first at ``start``."""

    start: int
    period: int
    count: int


def find_repeat(
    labels: Sequence[int],
    *,
    weights: Sequence[int],
    useful: Sequence[bool],
    paths: Sequence[tuple[str, str]],
) -> Repeat | None:
    """Repetition with the greatest weight, None if no stretch with a useful item repeats.

    Ties go to the shorter period, then to stretches that begin and end where the module tree branches highest
    (``paths`` are the module paths of an item's first and last node), then to the earlier start.
    """
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    best: tuple[tuple[int, int, int, int], Repeat] | None = None
    for repeat in _candidates(labels):
        end = repeat.start + repeat.period * repeat.count
        if not any(useful[repeat.start : repeat.start + repeat.period]):
            continue
        shared = _shared_depth(paths[repeat.start + repeat.period - 1][1], paths[repeat.start + repeat.period][0])
        rank = (total[end] - total[repeat.start], -repeat.period, -shared, -repeat.start)
        if best is None or rank > best[0]:
            best = (rank, repeat)
    return best[1] if best else None


def _candidates(labels: Sequence[int]) -> Iterator[Repeat]:
    """Every longest repetition, for each period and each rotation of its unit."""
    size = len(labels)
    for period in range(1, size // 2 + 1):
        run = 0
        for i in range(size - period + 1):
            if i < size - period and labels[i] == labels[i + period]:
                run += 1
                continue
            if run >= period:
                yield from _rotations(i - run, run + period, period)
            run = 0


def _rotations(start: int, length: int, period: int) -> Iterator[Repeat]:
    count = length // period
    for shift in range(length % period + 1):
        yield Repeat(start=start + shift, period=period, count=count)
    if count > 2 or (length % period == 0 and count == 2):
        for shift in range(length % period + 1, period):
            if count > 2:
                yield Repeat(start=start + shift, period=period, count=count - 1)


def _shared_depth(left: str, right: str) -> int:
    depth = 0
    for a, b in zip(left.split("."), right.split("."), strict=False):
        if a != b:
            break
        depth += 1
    return depth
