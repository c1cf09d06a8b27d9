"""A good cut of the chain without a solver: stages filled one after another up to a time, recompute where memory asks.

Binary search over the slowest stage's time. A stage takes as many segments as keep its time and its memory, each at
its fastest option; when they do not fit, segments move to smaller options, the cheapest in time per byte first. The
result is often optimal, which the bounds then show, and always a plan that fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoplan.solver.chain import ChainProblem, Counts, least_longest_us, objective_us
from autoplan.solver.chunks import construct_chunks
from autoplan.solver.ladder import ladder, numbers_between, price, size

_STEPS = 14
"""Halvings of the time: 1 part in 16,000."""

Mix = tuple[float, tuple[tuple[int, ...], ...]]
"""Time of a stage and its counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    chain: ChainProblem
    ladders: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    """Per run and number in flight: options from the fastest to the smallest, each worth its time."""
    mixes: dict[tuple[int, int, tuple[int, ...]], Mix | None] = field(default_factory=dict)
    """By number in flight, fixed bytes and segments of each run; the fixed time comes on top."""


def construct(chain: ChainProblem) -> Counts | None:
    """Counts that fit the memory, or None where this way finds none. Deterministic."""
    if chain.num_segments < len(chain.stages):
        return None
    if len(chain.stages) > len(chain.ranks):
        return construct_chunks(chain)
    filling = _Filling(chain=chain)
    if chain.cuts is not None:
        edges = (0, *chain.cuts, chain.num_segments)
        pinned = [_mix(filling, s, a, b) for s, (a, b) in enumerate(zip(edges, edges[1:], strict=False))]
        return None if any(mix is None for mix in pinned) else tuple(mix[1] for mix in pinned if mix is not None)
    low, high = least_longest_us(chain) * (1 + 1e-9), _ample_us(chain)
    best = _fill(filling, low)
    if best is not None:
        return best
    best = _fill(filling, high)
    for _ in range(_STEPS if best is not None else 0):
        middle = (low + high) / 2
        found = _fill(filling, middle)
        if found is None:
            low = middle
        else:
            high = middle
            best = min(best, found, key=lambda counts: objective_us(chain, counts)) if best else found
    return best


def _ample_us(chain: ChainProblem) -> float:
    """A time that never limits a stage."""
    slowest = sum(n * max(o.time_us for o in row) for n, row in zip(chain.lengths, chain.options, strict=True))
    return slowest + max(stage.fixed_us for stage in chain.stages)


def _fill(filling: _Filling, limit_us: float) -> Counts | None:
    """Stages of at most that time, each as full as can be; None when segments are left over."""
    chain = filling.chain
    start, count, found = 0, len(chain.stages), []
    for stage in range(count):
        most = chain.num_segments - (count - 1 - stage)
        end, mix = _fullest(filling, stage, start, most, limit_us)
        if mix is None:
            return None
        found.append(mix[1])
        start = end
    return tuple(found) if start == chain.num_segments else None


def _fullest(filling: _Filling, stage: int, start: int, most: int, limit_us: float) -> tuple[int, Mix | None]:
    """The last end up to which segments from ``start`` fit a stage, with their mix."""

    def fits(end: int) -> Mix | None:
        mix = _mix(filling, stage, start, end)
        return mix if mix is not None and mix[0] <= limit_us else None

    if stage == len(filling.chain.stages) - 1:
        return most, fits(most)
    good, found, step = start, None, 1
    while good < most and (mix := fits(min(good + step, most))) is not None:
        good, found, step = min(good + step, most), mix, step * 2
    bad = min(good + step, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        mix = fits(middle)
        good, found, bad = (middle, mix, bad) if mix is not None else (good, found, middle)
    return good, found


def _mix(filling: _Filling, stage: int, start: int, end: int) -> Mix | None:
    """Fastest options for a stretch of the chain within the stage's memory, by greed; None when nothing fits."""
    chain = filling.chain
    numbers = numbers_between(chain, start, end)
    limits = chain.stages[stage]
    key = chain.most_in_flight[stage], limits.fixed_bytes, tuple(numbers)
    if key not in filling.mixes:
        filling.mixes[key] = _greedy(filling, stage, numbers)
    mix = filling.mixes[key]
    return None if mix is None else (mix[0] + limits.fixed_us, mix[1])


def _greedy(filling: _Filling, stage: int, numbers: Sequence[int]) -> Mix | None:
    chain, flying = filling.chain, filling.chain.most_in_flight[stage]
    ladders = [_ladder_of(filling, r, flying) for r in range(len(numbers))]
    used = [[0] * len(row) for row in chain.options]
    for r, number in enumerate(numbers):
        used[r][ladders[r][0]] = number
    held = sum(param.state_bytes for param in chain.held(used))
    budget = chain.memory_bytes - held - flying * chain.stages[stage].fixed_bytes
    at = [0] * len(numbers)
    while (excess := _bytes(chain, used, flying) - budget) > 0:
        moves = [r for r, number in enumerate(numbers) if number and at[r] + 1 < len(ladders[r])]
        if not moves:
            return None
        r = min(moves, key=lambda r: (price(chain.options[r], ladders[r], at[r], flying), r))
        before, after = ladders[r][at[r]], ladders[r][at[r] + 1]
        saved = size(chain.options[r][before], flying) - size(chain.options[r][after], flying)
        number = min(used[r][before], max(1, -(-excess // saved)))
        used[r][before] -= number
        used[r][after] += number
        at[r] += used[r][before] == 0
    time = sum(n * o.time_us for row, ns in zip(chain.options, used, strict=True) for o, n in zip(row, ns, strict=True))
    return time, tuple(map(tuple, used))


def _bytes(chain: ChainProblem, used: Sequence[Sequence[int]], flying: int) -> int:
    total, transient = 0, 0
    for row, numbers in zip(chain.options, used, strict=True):
        for option, number in zip(row, numbers, strict=True):
            if number:
                total += number * size(option, flying)
                transient = max(transient, option.transient_bytes)
    return total + transient


def _ladder_of(filling: _Filling, run: int, flying: int) -> tuple[int, ...]:
    key = run, flying
    if key not in filling.ladders:
        filling.ladders[key] = ladder(filling.chain.options[run], flying)
    return filling.ladders[key]
