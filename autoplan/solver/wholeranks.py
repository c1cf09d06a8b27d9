"""A closer bound of the slowest rank: how long each rank takes for 19, 20, 21 whole segments, each by a small MILP.

Lagrange multipliers take fractions of options; where ranks hold several stages that keep different numbers of
microbatches, this leaves a gap. One rank alone is a small problem, and a handful of counts around the even share of the
longest run decides: with t_r(k) the least time of k segments on rank r, no step has a slowest rank below the least T
with sum over r of max {k : t_r(k) <= T} >= n.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from autoplan.solver.chain import ChainProblem, joint_us, longest_run

MOST_RANKS = 8
"""Ranks for which the small MILPs are worth their time."""


def slowest_rank_us(chain: ChainProblem, least_us: Callable[[ChainProblem], float]) -> float:
    """Joint time of a microbatch that no slowest rank beats; ``least_us`` bounds the time of a chain on one rank."""
    main = longest_run(chain)
    number, ranks = chain.lengths[main], len(chain.ranks)
    counts = range(max(1, number // ranks - 1), -(-number // ranks) + 2)
    times = [[least_us(one) for one in _alone(chain, main, rank, counts)] for rank in range(ranks)]
    for limit in sorted(time for row in times for time in row):
        held = [sum(time <= limit for time in row) for row in times]
        is_known = all(each < len(counts) for each in held)
        if not is_known or sum(counts[0] - 1 + each for each in held) >= number:
            return limit
    return float("inf")


def _alone(chain: ChainProblem, main: int, rank: int, counts: range) -> Iterator[ChainProblem]:
    """One rank with so many segments of the longest run and what its ends of the chain force on it, by joint time."""
    stages = chain.ranks[rank]
    options = tuple(
        tuple(replace(option, time_us=joint_us(chain, option), end_us=0.0) for option in row) for row in chain.options
    )
    forced = _forced(chain, main, rank)
    for count in counts:
        lengths = {**forced, main: count}
        runs = sorted(run for run, length in lengths.items() if length)
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
    """Segments before and after the longest run that the least sizes of the first and the last stage put on a rank."""
    found, last = dict[int, int](), len(chain.stages) - 1
    for stage, runs in ((0, range(main)), (last, range(len(chain.lengths) - 1, main, -1))):
        left = chain.sizes[0]
        for run in runs if stage in chain.ranks[rank] else ():
            found[run] = min(left, chain.lengths[run])
            left -= found[run]
    return found
