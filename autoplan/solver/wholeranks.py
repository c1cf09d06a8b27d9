"""A closer bound of the slowest rank: how long each rank takes for 19, 20, 21 whole segments, by small MILPs.

Lagrange multipliers take fractions of options; where ranks hold several stages that keep different numbers of
microbatches, this leaves a gap. One rank alone is a small problem, and a handful of counts around the even share of the
longest run decides: with t_r(k) the least time of k segments on rank r, no step has a slowest rank below the least T
with sum over r of max {k : t_r(k) <= T} >= n. Lower bounds of t_r(k) give one of T: multipliers bound all of them, and
MILPs only those that T may depend on.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from autoplan.solver.chain import ChainProblem, Counts, joint_us, longest_run
from autoplan.solver.dual import lower_bound_us
from autoplan.solver.ladder import numbers_between

MOST_RANKS = 32
"""Ranks for which the small MILPs are worth their time."""
_CLOSE = 0.97
"""Share of its true time that multipliers find for a rank, hardly ever less."""
Least = Callable[[ChainProblem], tuple[float, Counts | None]]


def slowest_rank(chain: ChainProblem, least: Least) -> tuple[float, Counts | None]:
    """Joint time of a microbatch that no slowest rank beats, and counts that may come close to it.

    ``least`` bounds the time of a chain on one rank, and finds counts for it. The counts need not fit the chain; None
    where ranks do not make up a chain.
    """
    main = longest_run(chain)
    number, ranks = chain.lengths[main], len(chain.ranks)
    counts = range(max(1, number // ranks - 1), -(-number // ranks) + 2)
    alone = [list(_alone(chain, main, rank, counts)) for rank in range(ranks)]
    bounded, solved = cache(_by_multipliers), cache(least)
    times = [[bounded(one) for one in row] for row in alone]
    open_places = {(rank, at) for rank in range(ranks) for at in range(len(counts))}
    while True:
        limit, most = _deciding(times, counts, number)
        if limit == float("inf"):
            return limit, None
        last = {(rank, each - 1) for rank, each in enumerate(most)} & open_places
        close = [(times[rank][at], rank, at) for rank, at in last if times[rank][at] >= limit * _CLOSE]
        if not close:
            break
        _, rank, at = max(close)
        open_places.remove((rank, at))
        times[rank][at] = max(times[rank][at], solved(alone[rank][at])[0])
    chosen = _fewer(times, most, counts[0], number)
    if chosen is None:
        return limit, None
    return limit, _together(chain, main, [solved(alone[rank][each - 1])[1] for rank, each in enumerate(chosen)])


def _by_multipliers(one: ChainProblem) -> float:
    """Infinite also where there are fewer segments than stages."""
    return lower_bound_us(one) if one.num_segments >= len(one.stages) else float("inf")


def _deciding(times: list[list[float]], counts: range, number: int) -> tuple[float, list[int]]:
    """Least time at which the ranks hold so many segments, or more than was tried; how many counts each reaches."""
    most = [0] * len(times)
    for time, rank, at in sorted((time, rank, at) for rank, row in enumerate(times) for at, time in enumerate(row)):
        if time == float("inf"):
            break
        most[rank] = max(most[rank], at + 1)
        if most[rank] == len(counts) or sum(counts[0] - 1 + each for each in most) >= number:
            return time, most
    return float("inf"), most


def _fewer(times: list[list[float]], most: list[int], first: int, number: int) -> list[int] | None:
    """As many counts of each rank as make up the run, less where a segment less saves the most."""
    chosen = list(most)
    while sum(first - 1 + each for each in chosen) > number:
        rank = max(range(len(chosen)), key=lambda r: (times[r][chosen[r] - 1] if chosen[r] > 1 else -1.0, r))
        chosen[rank] -= 1
    return chosen if min(chosen) > 0 and sum(first - 1 + each for each in chosen) == number else None


def _together(chain: ChainProblem, main: int, found: list[Counts | None]) -> Counts | None:
    """The chain that the counts of single ranks make up."""
    counts = [[[0] * len(row) for row in chain.options] for _ in chain.stages]
    for rank, mine in enumerate(found):
        if mine is None:
            return None
        runs = sorted({*_forced(chain, main, rank), main})
        for stage, used in zip(chain.ranks[rank], mine, strict=True):
            for run, row in zip(runs, used, strict=True):
                counts[stage][run] = list(row)
    made = tuple(tuple(map(tuple, stage)) for stage in counts)
    return made if _is_cut(chain, made) else None


def _is_cut(chain: ChainProblem, counts: Counts) -> bool:
    """Whether stages of legal sizes follow each other through the whole chain."""
    held = [[sum(row) for row in stage] for stage in counts]
    (least, most), edges = chain.sizes, [0]
    for stage in held:
        edges.append(edges[-1] + sum(stage))
        if not least <= sum(stage) <= most or stage != numbers_between(chain, edges[-2], edges[-1]):
            return False
    return edges[-1] == chain.num_segments


def _alone(chain: ChainProblem, main: int, rank: int, counts: range) -> Iterator[ChainProblem]:
    """One rank with so many segments of the longest run and what its ends of the chain force on it, by joint time."""
    stages = chain.ranks[rank]
    options = tuple(
        tuple(replace(option, time_us=joint_us(chain, option), end_us=0.0) for option in row) for row in chain.options
    )
    forced = _forced(chain, main, rank)
    for count in counts:
        lengths = {**forced, main: count}
        runs = sorted(lengths)
        yield ChainProblem(
            lengths=tuple(lengths[run] for run in runs),
            options=tuple(options[run] for run in runs),
            stages=tuple(chain.stages[stage] for stage in stages),
            ranks=(tuple(range(len(stages))),),
            in_flight=(chain.in_flight[rank],),
            num_microbatches=1,
            bubble_share=0.0,
            memory_bytes=chain.memory_bytes,
        )


def _forced(chain: ChainProblem, main: int, rank: int) -> dict[int, int]:
    """Segments before and after the longest run that the least sizes of the first and the last stage put on a rank.

    Runs of which none is forced are left out.
    """
    found, last = dict[int, int](), len(chain.stages) - 1
    for stage, runs in ((0, range(main)), (last, range(len(chain.lengths) - 1, main, -1))):
        left = chain.sizes[0]
        for run in runs if stage in chain.ranks[rank] else ():
            found[run] = min(left, chain.lengths[run])
            left -= found[run]
    return {run: number for run, number in found.items() if number}
