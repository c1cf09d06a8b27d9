"""A good cut for schedules with several stages per rank: stages alike, and recompute where a rank's memory asks."""

from collections.abc import Sequence
from itertools import accumulate

from autoplan.solver.chain import ChainProblem, Counts, objective_us, rank_bytes
from autoplan.solver.ladder import ladder, numbers_between, price, size

Used = list[list[list[int]]]
"""Counts while they change: by stage, run and option."""


def construct_chunks(chain: ChainProblem) -> Counts | None:
    """The best of a few even cuts; None where none fits the memory."""
    found = [counts for edges in _cuts(chain) if (counts := _with_options(chain, edges)) is not None]
    return min(found, key=lambda counts: objective_us(chain, counts), default=None)


def _cuts(chain: ChainProblem) -> list[tuple[int, ...]]:
    """Positions of all stages: as pinned, or even ones that give the larger stages to the middle, the front, the end."""
    count, total = len(chain.stages), chain.num_segments
    if chain.cuts is not None:
        edges = (0, *chain.cuts, total)
        sizes = [b - a for a, b in zip(edges, edges[1:], strict=False)]
        return [edges] if min(sizes) >= chain.sizes[0] and max(sizes) <= chain.sizes[1] else []
    least, more = divmod(total, count)
    spread = tuple(stage * total // count for stage in range(count + 1))
    larger = _larger(chain, least, more)
    balanced = tuple(accumulate((least + (stage in larger) for stage in range(count)), initial=0))
    return list(dict.fromkeys([balanced, spread]))


def _larger(chain: ChainProblem, least: int, more: int) -> set[int]:
    """Stages that get one segment more, so that the slowest rank is fast: each time on the rank with least to do."""
    fastest = [min(o.time_us for o in row) for row in chain.options]
    main = max(range(len(fastest)), key=lambda r: (chain.lengths[r] * fastest[r], -r))
    times = [fastest[r] for r, length in enumerate(chain.lengths) for _ in range(length)]
    count = len(chain.stages)
    load = [sum(least * fastest[main] for _ in stages) for stages in chain.ranks]
    load[chain.rank_of[0]] += sum(times[:least]) - least * fastest[main]
    load[chain.rank_of[count - 1]] += sum(times[len(times) - least :]) - least * fastest[main]
    found: set[int] = set()
    for _ in range(more):
        free = [(load[r], r) for r, stages in enumerate(chain.ranks) if not found.issuperset(stages)]
        rank = min(free)[1]
        found.add(max(s for s in chain.ranks[rank] if s not in found))
        load[rank] += fastest[main]
    return found


def _with_options(chain: ChainProblem, edges: Sequence[int]) -> Counts | None:
    used: Used = []
    for stage, flying in enumerate(chain.most_in_flight):
        numbers = numbers_between(chain, edges[stage], edges[stage + 1])
        used.append([_all(len(row), ladder(row, flying)[0], n) for row, n in zip(chain.options, numbers, strict=True)])
    if all(_fit(chain, used, rank) for rank in range(len(chain.ranks))):
        return tuple(tuple(map(tuple, stage)) for stage in used)
    return None


def _all(length: int, option: int, number: int) -> list[int]:
    return [number if o == option else 0 for o in range(length)]


def _fit(chain: ChainProblem, used: Used, rank: int) -> bool:
    """Move segments of a rank to smaller options, the cheapest in time per byte first, until its memory holds them."""
    at = {(stage, run): 0 for stage in chain.ranks[rank] for run in range(len(chain.lengths))}
    rungs = {(s, r): ladder(chain.options[r], chain.most_in_flight[s]) for s, r in at}
    while (excess := _rank_bytes(chain, used, rank) - chain.memory_bytes) > 0:
        moves = [
            (s, r) for (s, r), i in at.items() if i + 1 < len(rungs[s, r]) and used[s][r][rungs[s, r][i]]
        ]
        if not moves:
            return False
        stage, run = min(
            moves, key=lambda m: (price(chain.options[m[1]], rungs[m], at[m], chain.most_in_flight[m[0]]), m)
        )
        row, flying, i = chain.options[run], chain.most_in_flight[stage], at[stage, run]
        before, after = rungs[stage, run][i : i + 2]
        saved = size(row[before], flying) - size(row[after], flying)
        number = min(used[stage][run][before], max(1, -(-excess // saved)))
        used[stage][run][before] -= number
        used[stage][run][after] += number
        at[stage, run] += used[stage][run][before] == 0
    return True


def _rank_bytes(chain: ChainProblem, used: Used, rank: int) -> int:
    return rank_bytes(chain, tuple(tuple(map(tuple, stage)) for stage in used), rank)
