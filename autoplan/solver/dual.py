"""A lower bound of a chain's step that knows the memory, without a solver: Lagrange multipliers found in closed form.

For one rank, let c(T) be the most segments of the longest run that T microseconds and M bytes allow, fractions of
options allowed. It is a linear program in two constraints, so c(T) = min over v of (l_v T + u_v M), with v over the
vertices of {l t_o + u m_o >= 1 for every option o; l, u >= 0}. The least T at which the ranks together hold the run,
T*, bounds the slowest rank; with whole segments per rank, so does the least T with sum of floor(c_r(T)) >= n.

The vertices active at T* are the multipliers of time and memory of each rank. Any multipliers w_r >= 0 with sum at
most m - beta, and u_r >= 0, give a bound of the step:

    sum over runs k of n_k min over r, o of ((w_r + beta) t_ko - beta h_ko + u_r m_kor)
        + sum over r of (w_r + beta) fixed_r - u_r M_r          + E

with h what a row of the schedule hides, and E the least end. Weak duality of linear programs; see for example
Bertsimas and Tsitsiklis, "Introduction to Linear Optimization" (1997), chapter 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.solver.chain import ChainProblem, OptionCost, fastest_bound_us, least_end_us, least_longest_us

Array = NDArray[np.float64]
_SAFE = 1 - 1e-9
"""Taken off every bound for the rounding of floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """What the ranks of a chain have, as arrays over ranks."""

    flying: Array
    """Microbatches that every stage of the rank holds at some moment."""
    fixed_us: Array
    memory: Array
    """Bytes left for states and activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vertices:
    """``time[r, v]`` and ``memory[r, v]``: the multipliers of rank r at vertex v, infinite where there is none."""

    time: Array
    memory: Array


def lower_bound_us(chain: ChainProblem, *, whole: bool = True) -> float:
    """A step that no counts beat; infinite when the longest run fits nowhere.

    ``whole`` also asks how many whole segments each rank can hold, which takes longer.
    """
    simple = fastest_bound_us(chain)
    ranks = _ranks_of(chain)
    main = max(range(len(chain.lengths)), key=lambda r: (chain.lengths[r] * min(o.time_us for o in chain.options[r]), -r))
    times, sizes = _figures(chain.options[main], ranks)
    number = chain.lengths[main]
    vertices = _vertices(times, sizes)
    if (ranks.memory < 0).any():
        return float("inf")
    if _capacity(vertices, ranks, 1e30).sum() < number * _SAFE:
        return float("inf")
    least = least_longest_us(chain)
    shared = _shared_time(vertices, ranks, number, least)
    longest = _whole_time(vertices, ranks, number, shared) if whole else shared
    if longest == float("inf"):
        return longest
    multipliers = _active(vertices, ranks, shared)
    options = [_figures(row, ranks) for row in chain.options]
    found = [simple]
    for share, terms in [(0.0, chain.bubble_rows[0]), *((chain.bubble_share, row) for row in chain.bubble_rows)]:
        hidden = [np.array([o.hidden_us(terms) for o in row]) for row in chain.options]
        found.append(_by_multipliers(chain, ranks, options, hidden, share, multipliers))
        net = _net(chain, ranks, options, hidden, multipliers)
        found.append((chain.num_microbatches - share) * longest + share * max(net, 0.0) if share else 0.0)
    best = max(found[1:])
    return max(simple, (best + least_end_us(chain)) * _SAFE)


def _ranks_of(chain: ChainProblem) -> _Ranks:
    flying, fixed, memory = [], [], []
    transient = min(option.transient_bytes for row in chain.options for option in row)
    for rank, stages in enumerate(chain.ranks):
        moments = chain.in_flight[rank]
        least = max(min(moment) for moment in moments)
        held = max(
            sum(n * chain.stages[s].fixed_bytes for n, s in zip(moment, stages, strict=True)) for moment in moments
        )
        flying.append(float(least))
        fixed.append(sum(chain.stages[s].fixed_us for s in stages))
        memory.append(float(chain.memory_bytes - transient - (held if len(stages) == 1 else 0)))
    return _Ranks(flying=np.array(flying), fixed_us=np.array(fixed), memory=np.array(memory))


def _figures(row: Sequence[OptionCost], ranks: _Ranks) -> tuple[Array, Array]:
    """Time of each option, and its bytes on each rank."""
    times = np.array([o.time_us for o in row])
    state = np.array([float(o.state_bytes) for o in row])
    activation = np.array([float(o.activation_bytes) for o in row])
    return times, state[None, :] + ranks.flying[:, None] * activation[None, :]


def _vertices(times: Array, sizes: Array) -> _Vertices:
    """All vertices of every rank's multipliers: one constraint with an axis, or two with each other."""
    t, m = np.maximum(times, 1e-12), np.maximum(sizes, 1e-12)
    ranks, count = m.shape
    first, second = np.triu_indices(count, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        det = t[first] * m[:, second] - t[second] * m[:, first]
        time = (m[:, second] - m[:, first]) / det
        memory = (t[first] - t[second])[None, :] / det
    alone = np.full((ranks, 1), 1 / t.min())
    least = 1 / m.min(axis=1, keepdims=True)
    none = np.zeros((ranks, 1))
    time, memory = np.hstack([alone, none, time]), np.hstack([none, least, memory])
    covered = time[:, :, None] * t[None, None, :] + memory[:, :, None] * m[:, None, :]
    good = (time >= 0) & (memory >= 0) & (covered >= _SAFE).all(axis=2) & np.isfinite(time) & np.isfinite(memory)
    return _Vertices(time=np.where(good, time, np.inf), memory=np.where(good, memory, np.inf))


def _capacity(vertices: _Vertices, ranks: _Ranks, limit_us: float) -> Array:
    """Most segments of the run on each rank within a time."""
    left = np.maximum(limit_us - ranks.fixed_us, 0.0)
    return np.asarray((vertices.time * left[:, None] + vertices.memory * ranks.memory[:, None]).min(axis=1))


def _shared_time(vertices: _Vertices, ranks: _Ranks, number: int, low: float) -> float:
    """Least time at which the ranks together hold so many segments, fractions allowed.

    Newton's method: the capacity is concave in the time, so its tangents meet the number from below.
    """
    while True:
        missing = number * _SAFE - _capacity(vertices, ranks, low).sum()
        if missing <= 0:
            return low
        slope = _active(vertices, ranks, low)[0].sum()
        if slope <= 0:
            return float("inf")
        step = low + missing / slope
        if step <= low * (1 + 1e-12):
            return low
        low = step


def _whole_time(vertices: _Vertices, ranks: _Ranks, number: int, low: float) -> float:
    """The same with whole segments on each rank, to a hundred-thousandth from below."""

    def holds(limit_us: float) -> bool:
        return bool(np.floor(_capacity(vertices, ranks, limit_us) * (1 + 1e-9)).sum() >= number)

    if low == float("inf") or holds(low):
        return low
    if not holds(1e30):
        return float("inf")
    high = max(2 * low, 1.0)
    while not holds(high):
        low, high = high, high * 2
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return low


def _active(vertices: _Vertices, ranks: _Ranks, limit_us: float) -> tuple[Array, Array]:
    """Each rank's multipliers of time and memory at a time."""
    left = np.maximum(limit_us - ranks.fixed_us, 0.0)
    at = (vertices.time * left[:, None] + vertices.memory * ranks.memory[:, None]).argmin(axis=1)
    every = np.arange(len(at))
    return vertices.time[every, at], vertices.memory[every, at]


def _by_multipliers(
    chain: ChainProblem, ranks: _Ranks, options: Sequence[tuple[Array, Array]], hidden: Sequence[Array], share: float,
    multipliers: tuple[Array, Array],
) -> float:  # fmt: skip
    """The bound of the module's docstring, end apart."""
    time, memory = multipliers
    total, count = chain.num_microbatches - share, len(chain.ranks)
    if time.sum() <= 0:
        return 0.0
    scale = (total + count * share) / time.sum()
    weights = np.maximum(scale * time - share, 0.0)
    if weights.sum() > total:
        weights *= total / weights.sum()
    return _dual(chain, ranks, options, hidden, share, weights + share, scale * memory)


def _net(
    chain: ChainProblem, ranks: _Ranks, options: Sequence[tuple[Array, Array]], hidden: Sequence[Array],
    multipliers: tuple[Array, Array],
) -> float:  # fmt: skip
    """Least sum of the ranks' times net of what is hidden, within the memory."""
    time, memory = multipliers
    ones, none = np.ones_like(time), np.zeros_like(memory)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_time = np.where(time > 0, memory / np.maximum(time, 1e-300), 0.0)
    return max(
        _dual(chain, ranks, options, hidden, 1.0, ones, none), _dual(chain, ranks, options, hidden, 1.0, ones, per_time)
    )


def _dual(
    chain: ChainProblem, ranks: _Ranks, options: Sequence[tuple[Array, Array]], hidden: Sequence[Array], share: float,
    weights: Array, memory: Array,
) -> float:  # fmt: skip
    bound = float((weights * ranks.fixed_us - memory * ranks.memory).sum())
    for number, (times, sizes), less in zip(chain.lengths, options, hidden, strict=True):
        price = weights[:, None] * times[None, :] - share * less[None, :] + memory[:, None] * sizes
        bound += number * float(price.min())
    return bound
