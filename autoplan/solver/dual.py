"""A lower bound of a chain's step that knows the memory, without a solver: Lagrange multipliers found in closed form.

For one rank, let c(T) be the most segments of the longest run that T microseconds and M bytes allow, fractions of
options allowed. By duality, for any multipliers l, u >= 0 of time and memory,

    c(T) <= l T + u M + sum over the rank's stages s of most_s max(0, max over o of (1 - l t_o - u m_so))

and with one stage per rank the vertices of {l t_o + u m_o >= 1 for every option o} make this an equality. With several
stages the vertices for their average bytes are used; the last term pays for what stages hold beside the average. The
least T at which the ranks together hold the run bounds the slowest rank; with whole segments per rank, so does the
least T with sum of floor(c_r(T)) >= n, where fewer segments than ``_FEW`` are counted by trying all their options.

The vertices active there are the multipliers of time and memory of each rank. Any w_r >= 0 with sum at most m - beta,
and u_r >= 0, give a bound of the step:

    sum over runs k of the n_k cheapest places, at min over o of (w_r j_ko + beta (t_ko - h_ko) + u_r m_kso)
        + sum over r of w_r fixed_r + beta (fixed_r - h_r) - u_r M_r

with h what a row of the schedule hides, and j the *joint* time t + e / (m - beta) of a segment with its end of step e:
(m - beta) T + E is at least m - beta times the longest rank by joint time. T above is by joint time as well. Weak
duality of linear programs; see for example Bertsimas and Tsitsiklis, "Introduction to Linear Optimization" (1997),
chapter 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray

from autoplan.solver.chain import (
    ChainProblem,
    OptionCost,
    fastest_bound_us,
    joint_us,
    longest_bound_us,
    longest_run,
    shown_share,
)

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
_SAFE = 1 - 1e-9
"""Taken off every bound for the rounding of floats."""
_EVER = 1e30
_FEW, _MOST_OPTIONS = 4, 12
"""Segments of a rank of which every choice of options is tried, and the options of which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """What the ranks of a chain have, and their stages, as arrays."""

    fixed_us: Array
    memory: Array
    """Bytes left for states and activations."""
    average: Array
    """Microbatches in flight per segment, on average over the stages of a rank at one moment."""
    taken_us: Array
    """Time of the segments beside the longest run that the rank must have: the chain's first and last ones."""
    taken_bytes: Array
    rank_of: Indices
    """By stage."""
    flying: Array
    """By stage: microbatches in flight at the moment chosen for its rank."""
    most: int
    """Segments of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Duals:
    """Multipliers of rank r at vertex v, and what comes on top there: infinite where there is no vertex."""

    time: Array
    memory: Array
    extra: Array


def lower_bound_us(
    chain: ChainProblem, *, whole: bool = True, enough_us: float = float("inf"), slowest_us: float = 0.0
) -> float:
    """A step that no counts beat; infinite when the longest run fits nowhere.

    ``whole`` also asks how many whole segments each rank can hold. A bound of at least ``enough_us`` need not be the
    best: the cheapest one that reaches it is returned, memory left aside if that is enough. ``slowest_us`` is a bound
    of the slowest rank's joint time that is known already.
    """
    if enough_us < float("inf"):
        fastest = fastest_bound_us(chain) * _SAFE
        if fastest >= enough_us:
            return fastest
    return _variable_us(chain, whole, enough_us - chain.constant_us, slowest_us) * _SAFE + chain.constant_us


def _variable_us(chain: ChainProblem, whole: bool, enough_us: float, slowest_us: float) -> float:
    """The bound of what the counts decide."""
    times = [[joint_us(chain, option) for option in row] for row in chain.options]
    main = longest_run(chain)
    ranks, number = _ranks_of(chain, main, times), chain.lengths[main]
    duals = _duals(times[main], chain.options[main], ranks, single=len(chain.stages) == len(chain.ranks))
    if (ranks.memory < 0).any() or _capacity(duals, ranks, _EVER).sum() < number * _SAFE:
        return float("inf")
    share = shown_share(chain)
    total = chain.num_microbatches - share
    shared = _shared_time(duals, ranks, number, longest_bound_us(chain, times))
    rough = not whole or total * shared * _SAFE >= enough_us
    longest = (
        shared if rough else _whole_time(duals, ranks, number, shared, _few_times(chain, main, times[main], ranks))
    )
    longest = max(longest, slowest_us)
    if not share or total * longest * _SAFE >= enough_us:
        return total * longest
    multipliers = _active(duals, ranks, shared)
    prices = [_prices(chain, row, joint, ranks) for row, joint in zip(chain.options, times, strict=True)]
    fixed = _fixed_net(chain)
    tied = _by_multipliers(chain, ranks, prices, fixed, share, multipliers, main)
    net = np.maximum(_net(chain, ranks, prices, fixed, multipliers, main), 0.0)
    return max(float(tied.max()), total * longest + share * float(net.max()))


def _ranks_of(chain: ChainProblem, main: int, times: Sequence[Sequence[float]]) -> _Ranks:
    flying = np.zeros(len(chain.stages))
    average, fixed, memory = [], [], []
    transient = min(option.transient_bytes for row in chain.options for option in row)
    for rank, stages in enumerate(chain.ranks):
        moment = max(chain.in_flight[rank], key=lambda counts: (sum(counts), min(counts)))
        held = sum(n * chain.stages[s].fixed_bytes for n, s in zip(moment, stages, strict=True))
        flying[list(stages)] = moment
        average.append(sum(moment) / len(moment))
        fixed.append(sum(chain.stages[s].fixed_us for s in stages))
        memory.append(float(chain.memory_bytes - transient - held))
    taken = _taken(chain, main, times, flying)
    return _Ranks(
        fixed_us=np.array(fixed),
        memory=np.array(memory),
        average=np.array(average),
        taken_us=np.array([us for us, _ in taken]),
        taken_bytes=np.array([size for _, size in taken]),
        rank_of=np.array(chain.rank_of),
        flying=flying,
        most=chain.sizes[1],
    )


def _fixed_net(chain: ChainProblem) -> Array:
    """By row of the schedule and rank: fixed time less what the row hides of it."""
    each = [[stage.fixed_us - stage.hidden_us(terms) for stage in chain.stages] for terms in chain.bubble_rows]
    return np.array([[sum(row[s] for s in stages) for stages in chain.ranks] for row in each])


def _taken(
    chain: ChainProblem, main: int, times: Sequence[Sequence[float]], flying: Array
) -> list[tuple[float, float]]:
    """Least time and bytes, per rank, of what the sizes of the first and the last stage force on it."""
    found = [(0.0, 0.0)] * len(chain.ranks)
    last = len(chain.stages) - 1
    if not chain.contiguous:
        return found
    for stage, runs in ((0, range(main)), (last, range(len(chain.lengths) - 1, main, -1))):
        left, rank = chain.sizes[0] if last else chain.num_segments, chain.rank_of[stage]
        for run in runs:
            number = min(left, chain.lengths[run])
            left -= number
            time = min(times[run])
            size = min(o.state_bytes + flying[stage] * o.activation_bytes for o in chain.options[run])
            found[rank] = (found[rank][0] + number * time, found[rank][1] + number * size)
    return found


def _duals(times: Sequence[float], row: Sequence[OptionCost], ranks: _Ranks, *, single: bool) -> _Duals:
    """Multipliers of every rank to choose from: vertices for the average in flight, and for the least and the most."""
    t, state, activation = _undominated(
        np.maximum(np.array(times), 1e-12),
        np.array([float(o.state_bytes) for o in row]),
        np.array([float(o.activation_bytes) for o in row]),
    )
    count = len(ranks.average)
    if single:
        time, memory, good = _vertices(t, state + ranks.average[:, None] * activation)
        return _Duals(time=time, memory=memory, extra=np.where(good, 0.0, np.inf))
    least, most = np.full(count, np.inf), np.zeros(count)
    np.minimum.at(least, ranks.rank_of, ranks.flying)
    np.maximum.at(most, ranks.rank_of, ranks.flying)
    levels = np.stack([ranks.average, least, most, (ranks.average + least) / 2], axis=1)
    time, memory, good = _vertices(t, state + levels.reshape(-1, 1) * activation)
    time, memory, good = time.reshape(count, -1), memory.reshape(count, -1), good.reshape(count, -1)
    sizes = state + ranks.flying[:, None] * activation
    paid = time[ranks.rank_of][:, :, None] * t + memory[ranks.rank_of][:, :, None] * sizes[:, None, :]
    extra = np.zeros_like(time)
    np.add.at(extra, ranks.rank_of, ranks.most * np.maximum(0.0, 1 - paid.min(axis=2)))
    return _Duals(time=time, memory=memory, extra=np.where(good, extra, np.inf))


def _undominated(t: Array, state: Array, activation: Array) -> tuple[Array, Array, Array]:
    """Options that no other one equals or beats in all three: the constraints of the others are implied."""
    figures = np.stack([t, state, activation])
    below = (figures[:, :, None] <= figures[:, None, :]).all(axis=0)
    first = np.tri(len(t), k=-1, dtype=bool).T
    kept = ~((below & ~below.T) | (below & first)).any(axis=0)
    return t[kept], state[kept], activation[kept]


@cache
def _pairs(number: int) -> tuple[Indices, Indices]:
    """Every pair of so many."""
    return np.triu_indices(number, 1)


def _vertices(t: Array, m: Array) -> tuple[Array, Array, NDArray[np.bool_]]:
    """Vertices of {l t_o + u m_ro >= 1}: one constraint with an axis, or two with each other; and which there are."""
    m = np.maximum(m, 1e-12)
    first, second = _pairs(len(t))
    with np.errstate(divide="ignore", invalid="ignore"):
        det = t[first] * m[:, second] - t[second] * m[:, first]
        time = (m[:, second] - m[:, first]) / det
        memory = (t[first] - t[second]) / det
    none = np.zeros((len(m), 1))
    time = np.hstack([np.full((len(m), 1), 1 / t.min()), none, time])
    memory = np.hstack([none, 1 / m.min(axis=1, keepdims=True), memory])
    with np.errstate(invalid="ignore"):
        covered = time[:, :, None] * t + memory[:, :, None] * m[:, None, :]
    good = (time >= 0) & (memory >= 0) & (covered >= _SAFE).all(axis=2) & np.isfinite(time) & np.isfinite(memory)
    return np.where(good, time, 0.0), np.where(good, memory, 0.0), good


def _terms(duals: _Duals, ranks: _Ranks, limit_us: float) -> Array:
    """The bound of c(T) by each vertex."""
    left = np.maximum(limit_us - ranks.fixed_us - ranks.taken_us, 0.0)
    room = np.maximum(ranks.memory - ranks.taken_bytes, 0.0)
    return np.asarray(duals.time * left[:, None] + duals.memory * room[:, None] + duals.extra)


def _capacity(duals: _Duals, ranks: _Ranks, limit_us: float) -> Array:
    """Most segments of the run on each rank within a time."""
    return np.asarray(_terms(duals, ranks, limit_us).min(axis=1))


def _active(duals: _Duals, ranks: _Ranks, limit_us: float) -> tuple[Array, Array]:
    """Each rank's multipliers of time and memory at a time."""
    at = _terms(duals, ranks, limit_us).argmin(axis=1)
    every = np.arange(len(at))
    return duals.time[every, at], duals.memory[every, at]


def _shared_time(duals: _Duals, ranks: _Ranks, number: int, low: float) -> float:
    """Least time at which the ranks together hold so many segments, fractions allowed.

    Newton's method: the capacity is concave in the time, so its tangents meet the number from below.
    """
    while True:
        missing = number * _SAFE - _capacity(duals, ranks, low).sum()
        if missing <= 0:
            return low
        slope = _active(duals, ranks, low)[0].sum()
        if slope <= 0:
            return float("inf")
        step = low + missing / slope
        if step <= low * (1 + 1e-12):
            return low
        low = step


def _few_times(chain: ChainProblem, main: int, times: Sequence[float], ranks: _Ranks) -> Array:
    """Least time in which a rank runs 1, 2, ... whole segments within its memory, if it has to run so few.

    Its segments count as if all were on the stage with the least in flight.
    """
    row, count = chain.options[main], len(ranks.average)
    if chain.lengths[main] > _FEW * count or len(row) > _MOST_OPTIONS:
        return np.zeros((count, 0))
    t, state, activation, transient = np.array(
        [(time, o.state_bytes, o.activation_bytes, o.transient_bytes) for time, o in zip(times, row, strict=True)]
    ).T
    smallest = min(option.transient_bytes for options in chain.options for option in options)
    least = np.full(count, np.inf)
    np.minimum.at(least, ranks.rank_of, ranks.flying)
    room = (ranks.memory - ranks.taken_bytes + smallest)[:, None]
    found = []
    for number in range(1, _FEW + 1):
        used = multisets(len(row), number)
        kept = state[used].sum(axis=1) + least[:, None] * activation[used].sum(axis=1)
        fits = kept + transient[used].max(axis=1) <= room
        found.append(np.where(fits, t[used].sum(axis=1), np.inf).min(axis=1))
    return np.asarray(np.stack(found, axis=1) + (ranks.fixed_us + ranks.taken_us)[:, None])


@cache
def multisets(options: int, number: int) -> Indices:
    """Every choice of so many out of the options, order aside."""
    return np.array(list(combinations_with_replacement(range(options), number)), dtype=np.intp)


def _whole_time(duals: _Duals, ranks: _Ranks, number: int, low: float, few: Array) -> float:
    """The same with whole segments on each rank; ``few`` has their least times.

    The ranks hold some at ``low`` already; the times at which each holds one more, and another, are in closed form.
    """
    if low == float("inf"):
        return low
    held = np.floor(_capacity(duals, ranks, low) * (1 + 1e-9))
    if few.shape[1]:
        counted = (few * _SAFE <= low).sum(axis=1)
        held = np.where(counted < few.shape[1], np.minimum(held, counted), held)
    missing, ahead = int(number - held.sum()), 2
    while missing > 0:
        times = _reached(duals, ranks, held[:, None] + np.arange(1, ahead + 1), few)
        enough = np.sort(times, axis=None)[missing - 1] if missing <= times.size else np.inf
        if (times[:, -1] >= enough).all():
            return float(max(low, enough))
        ahead *= 2
    return low


def _reached(duals: _Duals, ranks: _Ranks, counts: Array, few: Array) -> Array:
    """Least time at which each rank holds so many segments: the inverse of ``_capacity``, one column per count."""
    room = np.maximum(ranks.memory - ranks.taken_bytes, 0.0)
    over = counts[:, :, None] * _SAFE - (duals.memory * room[:, None] + duals.extra)[:, None, :]
    slope = np.broadcast_to(duals.time[:, None, :], over.shape)
    never = np.where(over > 0, np.inf, 0.0)
    times = np.divide(over, slope, out=never, where=slope > 0).max(axis=2)
    times = np.maximum(times, 0.0) + (ranks.fixed_us + ranks.taken_us)[:, None]
    if few.shape[1]:
        index = np.minimum(counts.astype(np.intp), few.shape[1]) - 1
        by_options = np.take_along_axis(few, index, axis=1) * _SAFE
        times = np.where(counts <= few.shape[1], np.maximum(times, by_options), times)
    return np.asarray(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prices:
    """One run: joint time by option, time net of what is hidden by row and option, bytes by stage and option."""

    joint: Array
    net: Array
    sizes: Array


def _prices(chain: ChainProblem, row: Sequence[OptionCost], joint: Sequence[float], ranks: _Ranks) -> _Prices:
    state = np.array([float(o.state_bytes) for o in row])
    activation = np.array([float(o.activation_bytes) for o in row])
    return _Prices(
        joint=np.array(joint),
        net=np.array([[o.time_us - o.hidden_us(terms) for o in row] for terms in chain.bubble_rows]),
        sizes=state[None, :] + ranks.flying[:, None] * activation[None, :],
    )


def _by_multipliers(
    chain: ChainProblem, ranks: _Ranks, prices: Sequence[_Prices], fixed: Array, share: float,
    multipliers: tuple[Array, Array], main: int,
) -> Array:  # fmt: skip
    """The bound of the module's docstring, by row of the schedule."""
    time, memory = multipliers
    total = chain.num_microbatches - share
    if time.sum() <= 0:
        return np.zeros(1)
    scale = (total + len(chain.ranks) * share) / time.sum()
    weights = np.maximum(scale * time - share, 0.0)
    if weights.sum() > total:
        weights *= total / weights.sum()
    return _dual(chain, ranks, prices, fixed, weights, share, scale * memory, main)


def _net(
    chain: ChainProblem, ranks: _Ranks, prices: Sequence[_Prices], fixed: Array, multipliers: tuple[Array, Array],
    main: int,
) -> Array:  # fmt: skip
    """Least sum of the ranks' times net of what is hidden, within the memory, by row of the schedule."""
    time, memory = multipliers
    none = np.zeros_like(time)
    found = _dual(chain, ranks, prices, fixed, none, 1.0, none, main)
    if not memory.any():
        return found
    per_time = np.where(time > 0, memory / np.maximum(time, 1e-300), 0.0)
    return np.maximum(found, _dual(chain, ranks, prices, fixed, none, 1.0, per_time, main))


def _dual(
    chain: ChainProblem, ranks: _Ranks, prices: Sequence[_Prices], fixed: Array, weights: Array, share: float,
    memory: Array, main: int,
) -> Array:  # fmt: skip
    """Least of weights x joint time + share x net time + memory x (bytes - limit), over all ways to place segments."""
    bound = float((weights * ranks.fixed_us - memory * ranks.memory).sum()) + share * fixed.sum(axis=1)
    weight, byte = weights[ranks.rank_of][:, None], memory[ranks.rank_of][:, None]
    for run, (number, price) in enumerate(zip(chain.lengths, prices, strict=True)):
        placed = weight * price.joint + byte * price.sizes
        each = (placed[None, :, :] + share * price.net[:, None, :]).min(axis=2)
        if run == main and ranks.most < number:
            each.sort(axis=1)
            full = number // ranks.most
            bound = bound + ranks.most * each[:, :full].sum(axis=1)
            if number % ranks.most:
                bound = bound + (number - full * ranks.most) * each[:, full]
        else:
            bound = bound + number * each.min(axis=1)
    return np.asarray(bound)
