"""A good cut for schedules with several stages per rank: stages alike, and recompute where a rank's memory asks."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from autoplan.solver.chain import ChainProblem, Counts, objective_us, rank_bytes, rank_times
from autoplan.solver.ladder import ladder, numbers_between, price, size

_MOVES = 12

Used = list[list[list[int]]]
"""Counts while they change: by stage, run and option."""


def construct_chunks(chain: ChainProblem) -> Counts | None:
    """The best of a few even cuts; None where none fits the memory."""
    if chain.cuts is not None:
        return _with_options(chain, pinned) if (pinned := _pinned(chain)) else None
    count, total = len(chain.stages), chain.num_segments
    least, more = divmod(total, count)
    found = [_with_options(chain, tuple(stage * total // count for stage in range(count + 1)))]
    found.append(_improved(chain, least, _larger(chain, least, more)))
    return min((c for c in found if c is not None), key=lambda counts: objective_us(chain, counts), default=None)


def _pinned(chain: ChainProblem) -> tuple[int, ...] | None:
    """The pinned positions of all stages, if these are alike."""
    edges = (0, *(chain.cuts or ()), chain.num_segments)
    sizes = [b - a for a, b in pairwise(edges)]
    return edges if min(sizes) >= chain.sizes[0] and max(sizes) <= chain.sizes[1] else None


def _improved(chain: ChainProblem, least: int, larger: set[int]) -> Counts | None:
    """Move a segment from the slowest rank to the fastest, memory counted, as long as the step gets shorter."""
    best = _with_options(chain, _edges(chain, least, larger))
    for _ in range(_MOVES if best is not None else 0):
        assert best is not None
        times = rank_times(chain, best)
        givers = sorted((-times[chain.rank_of[s]], s) for s in larger)
        takers = sorted((times[chain.rank_of[s]], -s) for s in range(len(chain.stages)) if s not in larger)
        if not givers or not takers or -givers[0][0] <= takers[0][0]:
            break
        moved = (larger - {givers[0][1]}) | {-takers[0][1]}
        found = _with_options(chain, _edges(chain, least, moved))
        if found is None or objective_us(chain, found) >= objective_us(chain, best):
            break
        best, larger = found, moved
    return best


def _edges(chain: ChainProblem, least: int, larger: set[int]) -> tuple[int, ...]:
    """Positions of all stages when those in ``larger`` have one segment more than the others."""
    return tuple(accumulate((least + (stage in larger) for stage in range(len(chain.stages))), initial=0))


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
        moves = [(s, r) for (s, r), i in at.items() if i + 1 < len(rungs[s, r]) and used[s][r][rungs[s, r][i]]]
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
