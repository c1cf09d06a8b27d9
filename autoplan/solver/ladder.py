"""Options of a run from the fastest to the smallest, each step worth its time: what greed climbs down."""

from collections.abc import Sequence

from autoplan.solver.chain import ChainProblem, OptionCost


def size(option: OptionCost, flying: int) -> int:
    """Bytes of states and activations of a segment with so many microbatches in flight."""
    return option.state_bytes + flying * option.activation_bytes


def price(row: Sequence[OptionCost], rungs: Sequence[int], at: int, flying: int) -> float:
    """Microseconds per byte that the next rung saves."""
    before, after = row[rungs[at]], row[rungs[at + 1]]
    return (after.time_us - before.time_us) / (size(before, flying) - size(after, flying))


def ladder(row: Sequence[OptionCost], flying: int) -> tuple[int, ...]:
    """Options on the lower convex hull of time over bytes, fastest first; each next one is smaller."""
    order = sorted(range(len(row)), key=lambda o: (row[o].time_us, size(row[o], flying), o))
    hull: list[int] = []
    for option in order:
        if hull and size(row[option], flying) >= size(row[hull[-1]], flying):
            continue
        hull.append(option)
        while len(hull) > 2 and price(row, hull[-3:], 1, flying) <= price(row, hull[-3:], 0, flying):
            del hull[-2]
    return tuple(hull)


def numbers_between(chain: ChainProblem, start: int, end: int) -> list[int]:
    """Segments of each run between two positions of the chain."""
    numbers, at = [], 0
    for length in chain.lengths:
        numbers.append(max(0, min(end, at + length) - max(start, at)))
        at += length
    return numbers
