"""Ranks whose few segments are known: the best options of each by trying all, where fractions of options mislead.

With several chunks per rank and as many segments as stages divide, every stage has the same number of segments, so
each rank's are known. Its least joint time within the memory is exact, and the slowest rank bounds the step.
"""

from collections.abc import Iterator
from itertools import product

from autoplan.solver.chain import ChainProblem, Counts, joint_us, least_net_us, objective_us, shown_share
from autoplan.solver.ladder import numbers_between

_MOST_TRIED = 1000
"""Combinations of options on one rank."""


def try_all(chain: ChainProblem) -> tuple[float, Counts] | None:
    """A lower bound of the step and the counts that take each rank's least joint time; None where ranks are open.

    An infinite bound says that some rank fits no options.
    """
    least, most = chain.sizes
    if least != most or chain.cuts is not None:
        return None
    contents = [_runs_at(chain, stage * least, (stage + 1) * least) for stage in range(len(chain.stages))]
    joint = [[joint_us(chain, option) for option in row] for row in chain.options]
    chosen: dict[int, tuple[int, ...]] = {}
    longest = 0.0
    for rank, stages in enumerate(chain.ranks):
        runs = [run for stage in stages for run in contents[stage]]
        best = min(_ways(chain, rank, runs, [len(contents[s]) for s in stages], joint), default=None)
        if best is None:
            return None if _too_many(chain, runs) else (float("inf"), ())
        longest = max(longest, best[0] + sum(chain.stages[s].fixed_us for s in stages))
        picks = iter(best[1])
        chosen |= {stage: tuple(next(picks) for _ in contents[stage]) for stage in stages}
    counts = tuple(_counts(chain, contents[s], chosen[s]) for s in range(len(chain.stages)))
    bound = (chain.num_microbatches - shown_share(chain)) * longest + shown_share(chain) * least_net_us(chain)
    return min(bound + chain.constant_us, objective_us(chain, counts)), counts


def _runs_at(chain: ChainProblem, start: int, end: int) -> list[int]:
    return [run for run, number in enumerate(numbers_between(chain, start, end)) for _ in range(number)]


def _too_many(chain: ChainProblem, runs: list[int]) -> bool:
    total = 1
    for run in runs:
        total *= len(chain.options[run])
    return total > _MOST_TRIED


def _ways(
    chain: ChainProblem, rank: int, runs: list[int], sizes: list[int], joint: list[list[float]]
) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Joint time and options of the rank's segments, for every combination that fits its memory."""
    if _too_many(chain, runs):
        return
    at = [chunk for chunk, size in enumerate(sizes) for _ in range(size)]
    fixed = [chain.stages[s].fixed_bytes for s in chain.ranks[rank]]
    for picks in product(*(range(len(chain.options[run])) for run in runs)):
        options = [chain.options[run][pick] for run, pick in zip(runs, picks, strict=True)]
        still = sum(o.state_bytes for o in options) + max(o.transient_bytes for o in options)
        kept = list(fixed)
        for chunk, option in zip(at, options, strict=True):
            kept[chunk] += option.activation_bytes
        fullest = max(sum(n * size for n, size in zip(m, kept, strict=True)) for m in chain.in_flight[rank])
        if still + fullest <= chain.memory_bytes:
            yield sum(joint[run][pick] for run, pick in zip(runs, picks, strict=True)), picks


def _counts(chain: ChainProblem, runs: list[int], picks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    used = [[0] * len(row) for row in chain.options]
    for run, pick in zip(runs, picks, strict=True):
        used[run][pick] += 1
    return tuple(map(tuple, used))
