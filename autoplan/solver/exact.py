"""Ranks whose few segments are known: the best options of each by trying all, where fractions of options mislead.

With several chunks per rank all stages have the same number of segments up to one, so there are few ways to cut: each
is an *arrangement*. In one, every rank has a known handful of segments; all choices of their options that fit the
memory are listed, by joint time j and by time n net of what a row of the schedule hides. With F_r(T) the least n of
rank r among those with j <= T, no counts of the arrangement beat

    max over rows of min over T of (m - beta) T + beta x sum over r of F_r(T)

and the choices that F takes at the best T are counts that come close to it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from math import comb

import numpy as np
from numpy.typing import NDArray

from autoplan.solver.chain import ChainProblem, Counts, joint_us, objective_us, overflow_bytes, shown_share
from autoplan.solver.dual import multisets
from autoplan.solver.ladder import numbers_between

Array = NDArray[np.float64]
Content = tuple[tuple[int, int], ...]
"""One stage: pairs of a run and the number of its segments there."""

_MOST_CHOICES = 20_000
"""Choices of options of one rank."""
_MOST_ARRANGEMENTS = 200
_MOST_TRIED = 8
"""Arrangements whose counts are made, the best ones by their bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """All choices of a rank that fit, by rising joint time."""

    joint: Array
    net: Array
    """By row of the schedule and choice."""
    picks: NDArray[np.intp]
    """By choice and group of segments: which multiset of options."""


def try_all(chain: ChainProblem) -> tuple[float, Counts] | None:
    """A lower bound of the step, and the best counts that were met; None where there are too many to try.

    An infinite bound says that in every arrangement some rank fits no options.
    """
    arrangements = _arrangements(chain)
    if arrangements is None:
        return None
    known: dict[tuple[int, tuple[Content, ...]], _Choices | None] = {}
    found: list[tuple[float, float, tuple[Content, ...]]] = []
    for contents in arrangements:
        ranks = []
        for rank, stages in enumerate(chain.ranks):
            key = rank, tuple(contents[stage] for stage in stages)
            if _number_of_choices(chain, key[1]) > _MOST_CHOICES:
                return None
            if key not in known:
                known[key] = _choices(chain, rank, key[1])
            ranks.append(known[key])
        fitting = [choices for choices in ranks if choices is not None]
        bound, limit = _best_limit(chain, fitting) if len(fitting) == len(ranks) else (float("inf"), 0.0)
        found.append((bound, limit, contents))
    found.sort(key=lambda one: one[0])
    if found[0][0] == float("inf"):
        return float("inf"), ()
    best: Counts | None = None
    for bound, limit, contents in found[:_MOST_TRIED]:
        if bound < float("inf"):
            best = better(chain, best, _counts_at(chain, known, contents, limit))
    value = float("inf") if best is None else objective_us(chain, best)
    return min(found[0][0] + chain.constant_us, value), best or ()


def better(chain: ChainProblem, found: Counts | None, other: Counts) -> Counts | None:
    """The faster of what was found and of others that fit the memory."""
    if not other or overflow_bytes(chain, other) > 0:
        return found
    if found is None or objective_us(chain, other) < objective_us(chain, found):
        return other
    return found


def _arrangements(chain: ChainProblem) -> list[tuple[Content, ...]] | None:
    """Every way to cut the chain into stages that are alike up to one segment; None where there are too many."""
    stages, (least, most) = len(chain.stages), chain.sizes
    longer = chain.num_segments - least * stages
    if chain.cuts is not None or most - least > 1 or comb(stages, longer) > _MOST_ARRANGEMENTS:
        return None
    found = []
    for long in combinations(range(stages), longer):
        edges = np.cumsum([0, *(least + (stage in long) for stage in range(stages))])
        found.append(tuple(_content(chain, int(a), int(b)) for a, b in zip(edges, edges[1:], strict=False)))
    return found


def _content(chain: ChainProblem, start: int, end: int) -> Content:
    return tuple((run, number) for run, number in enumerate(numbers_between(chain, start, end)) if number)


def _number_of_choices(chain: ChainProblem, contents: Sequence[Content]) -> int:
    total = 1
    for run, number in (pair for content in contents for pair in content):
        total *= comb(len(chain.options[run]) + number - 1, number)
    return total


def _choices(chain: ChainProblem, rank: int, contents: tuple[Content, ...]) -> _Choices | None:
    """All choices of options that fit the memory; None where none does."""
    stages, rows = chain.ranks[rank], chain.bubble_rows
    fixed = [chain.stages[stage] for stage in stages]
    joint = np.array([sum(stage.fixed_us for stage in fixed)])
    net = np.array([[sum(stage.fixed_us - stage.hidden_us(row) for stage in fixed)] for row in rows])
    state, transient, picks = np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.intp)
    kept = np.array([[float(stage.fixed_bytes)] for stage in fixed])
    for chunk, run, number in _groups(contents):
        options, used = chain.options[run], multisets(len(chain.options[run]), number)
        times = np.array([joint_us(chain, option) for option in options])
        shown = np.array([[option.time_us - option.hidden_us(row) for option in options] for row in rows])
        joint = _outer(joint, times[used].sum(axis=1))
        net = np.stack([_outer(mine, each[used].sum(axis=1)) for mine, each in zip(net, shown, strict=True)])
        state = _outer(state, np.array([o.state_bytes for o in options])[used].sum(axis=1))
        largest = np.array([o.transient_bytes for o in options])[used].max(axis=1)
        transient = np.maximum(transient[:, None], largest[None, :]).ravel()
        bytes_ = np.array([o.activation_bytes for o in options])[used].sum(axis=1)
        kept = np.stack([_outer(size, bytes_ * (c == chunk)) for c, size in enumerate(kept)])
        picks = np.hstack([np.repeat(picks, len(used), axis=0), np.tile(np.arange(len(used)), len(picks))[:, None]])
    fullest = np.max([np.array(moment) @ kept for moment in chain.in_flight[rank]], axis=0)
    fits = np.flatnonzero(state + transient + fullest <= chain.memory_bytes)
    if not len(fits):
        return None
    order = fits[np.argsort(joint[fits], kind="stable")]
    return _Choices(joint=joint[order], net=net[:, order], picks=picks[order])


def _groups(contents: Sequence[Content]) -> Iterator[tuple[int, int, int]]:
    """Chunk, run and number of the segments that are alike."""
    return ((chunk, run, number) for chunk, content in enumerate(contents) for run, number in content)


def _outer(left: Array, right: Array) -> Array:
    return (left[:, None] + right[None, :]).ravel()


def _best_limit(chain: ChainProblem, ranks: Sequence[_Choices]) -> tuple[float, float]:
    """The bound of an arrangement, and the limit on the slowest rank that it is met at."""
    share = shown_share(chain)
    total = chain.num_microbatches - share
    best = (0.0, 0.0)
    for row in range(len(chain.bubble_rows)):
        fronts = [_front(choices, row) for choices in ranks]
        least = max(front[0][0] for front in fronts)
        limits = np.unique(np.concatenate([[least], *(front[0][front[0] > least] for front in fronts)]))
        nets = sum(front[1][np.searchsorted(front[0], limits, side="right") - 1] for front in fronts)
        steps = total * limits + share * np.maximum(nets, 0.0)
        at = int(np.argmin(steps))
        best = max(best, (float(steps[at]), float(limits[at])))
    return best


def _front(choices: _Choices, row: int) -> tuple[Array, Array]:
    """Joint times at which the least net time falls, and that net time."""
    least = np.minimum.accumulate(choices.net[row])
    falls = np.concatenate([[True], least[1:] < least[:-1]])
    return choices.joint[falls], least[falls]


def _counts_at(
    chain: ChainProblem, known: dict[tuple[int, tuple[Content, ...]], _Choices | None], contents: tuple[Content, ...],
    limit: float,
) -> Counts:  # fmt: skip
    """Counts of an arrangement whose slowest rank stays within a limit, each rank by its least net time."""
    found = [[[0] * len(row) for row in chain.options] for _ in chain.stages]
    for rank, stages in enumerate(chain.ranks):
        mine = tuple(contents[stage] for stage in stages)
        choices = known[rank, mine]
        assert choices is not None
        within = int(np.searchsorted(choices.joint, limit * (1 + 1e-12), side="right"))
        row = int(np.argmax(choices.net[:, :within].min(axis=1)))
        picks = choices.picks[int(np.argmin(choices.net[row, :within]))]
        for pick, (chunk, run, number) in zip(picks, _groups(mine), strict=True):
            for option, used in groupby(multisets(len(chain.options[run]), number)[pick].tolist()):
                found[stages[chunk]][run][option] += len(list(used))
    return tuple(tuple(map(tuple, stage)) for stage in found)
