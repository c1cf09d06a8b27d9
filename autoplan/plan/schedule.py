"""Pipeline schedules as data: who runs what in which order, what stays in flight, what the bubble costs.

A model is cut into p x v virtual stages in chain order; each of p ranks holds v of them, its chunks. On a stage a rank
does up to three things to a microbatch, one action each:

    F   forward
    B   backward: the gradient of the inputs, and that of the weights too unless the schedule splits them
    W   the gradient of the weights, in schedules that split

The orders are those of ``torch.distributed.pipelining``: Schedule1F1B; ScheduleInterleaved1F1B (Narayanan et al. 2021);
ScheduleInterleavedZeroBubble (ZB-H1 of Qi et al. 2023, here with any number of chunks); ScheduleZBVZeroBubble (ZB-V,
same paper). Nothing here needs torch; a test compares the two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplan.errors import InputError
from autoplan.plan.plan import ScheduleKind

What = Literal["F", "B", "W"]
_WHATS: tuple[What, ...] = ("F", "B", "W")
Counts = tuple[int, ...]
"""Microbatches in flight, one number per chunk."""
Path = NDArray[np.intp]
"""Rows of such numbers, in the order of time."""


class Action(NamedTuple):
    """One stage at work on one microbatch. Prints as torch prints it: ``2F0`` is stage 2, forward, microbatch 0."""

    what: What
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """``2F0``."""
        return f"{self.stage}{self.what}{self.microbatch}"


def splits_backward(kind: ScheduleKind) -> bool:
    """Whether gradients of weights are actions of their own."""
    return kind in ("zero-bubble", "zbv")


def rank_of(kind: ScheduleKind, p: int, v: int, stage: int) -> int:
    """The rank that holds a virtual stage: round after round over the ranks, for zbv there and back."""
    return 2 * p - 1 - stage if kind == "zbv" and stage >= p else stage % p


def stages_of(kind: ScheduleKind, p: int, v: int, rank: int) -> tuple[int, ...]:
    """The virtual stages of a rank, chunk after chunk."""
    return (rank, 2 * p - 1 - rank) if kind == "zbv" else tuple(range(rank, p * v, p))


def allowed(kind: ScheduleKind, p: int, v: int, m: int) -> str:
    """Empty when p ranks with v chunks can run m microbatches so; otherwise the reason why not.

    These are torch's own requirements but for one: with a single chunk torch's interleaved schedule is a slower-filling
    1F1B that keeps more in flight, and is refused.
    """
    if min(p, v, m) < 1:
        return f"there must be a rank, a chunk and a microbatch, found {p}, {v} and {m}"
    match kind:
        case "1f1b":
            if v != 1:
                return f"it runs one stage per rank, found {v}"
            return "" if m >= p else f"it needs a microbatch for each of {p} ranks, found {m}"
        case "zbv":
            return "" if v == 2 else f"it runs two stages per rank, found {v}"  # noqa: PLR2004
        case "interleaved" | "zero-bubble":
            if kind == "interleaved" and v == 1:
                return "it needs several stages per rank; with one, 1f1b takes the same time and less memory"
            left, rounds = m % _rounds(p, m), _rounds(p, m)
            return f"{m} microbatches do not make {rounds} equal rounds on {p} ranks" if left else ""


def orders(kind: ScheduleKind, p: int, v: int, m: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank does, in running order. Raises InputError where ``allowed`` gives a reason."""
    if reason := allowed(kind, p, v, m):
        raise InputError(f"no {kind} schedule: {reason}")
    size, rounds = _cycle(kind, p, m)
    return tuple(tuple(_order(kind, p, v, size, rounds, rank)) for rank in range(p))


def _rounds(p: int, m: int) -> int:
    """Rounds of at least p microbatches, one where there are fewer."""
    return max(1, m // p)


def _cycle(kind: ScheduleKind, p: int, m: int) -> tuple[int, int]:
    """Microbatches that a chunk runs before the next chunk's turn, and how often every chunk has a turn."""
    if kind in ("1f1b", "zbv"):
        return m, 1
    return m // _rounds(p, m), _rounds(p, m)


def _order(kind: ScheduleKind, p: int, v: int, size: int, rounds: int, rank: int) -> Iterator[Action]:
    """The order of one rank for ``rounds`` rounds of ``size`` microbatches."""
    if kind == "zbv":
        return _v_order(p, size * rounds, rank)
    return _loop_order(kind, stages_of(kind, p, v, rank), size, rounds, p - 1 - rank, rank)


def _loop_order(
    kind: ScheduleKind, stages: Sequence[int], size: int, rounds: int, after: int, before: int
) -> Iterator[Action]:
    """One forward, one backward, after a warm-up that grows with the ranks that come ``after`` this one.

    Forward passes take the chunks in turn, backward passes in reverse; gradients of weights trail by as many passes as
    there are ranks ``before``, so that every rank keeps equally much in flight.
    """
    total = len(stages) * size * rounds
    backwards = tuple(reversed(stages))

    def action(what: What, index: int) -> Action:
        turn, place = divmod(index, size)
        cycle, chunk = divmod(turn, len(stages))
        return Action(what, (stages if what == "F" else backwards)[chunk], cycle * size + place)

    warmup = _warmup(kind, len(stages), size, rounds, after)
    for i in range(warmup):
        yield action("F", i)
    for i in range(total):
        if warmup + i < total:
            yield action("F", warmup + i)
        yield action("B", i)
        if splits_backward(kind) and i >= before:
            yield action("W", i - before)
    if splits_backward(kind):
        for i in range(max(0, total - before), total):
            yield action("W", i)


def _warmup(kind: ScheduleKind, v: int, size: int, rounds: int, after: int) -> int:
    """Forward passes before the first backward pass."""
    hops = 2 * after if kind == "interleaved" else after
    return min(v * size * rounds, (v - 1) * size + hops)


def _v_order(p: int, m: int, rank: int) -> Iterator[Action]:
    """ZB-V: the first chunk goes down the ranks and the second comes back, so the last rank turns without a send.

    The order is made for at least 2p - 1 microbatches, which fill the pipeline; those beyond m are left out.
    """
    down, up = stages_of("zbv", p, 2, rank)
    after, full = p - rank, max(m, 2 * p - 1)
    f_down, b_down, w_down = ((what, down) for what in _WHATS)
    f_up, b_up, w_up = ((what, up) for what in _WHATS)
    fill = [f_down] * (2 * after - 1) + [f_up, f_down] * rank + [f_up, b_up, w_up] * after
    steady = [f_down, b_down, w_down, f_up, b_up, w_up] * (full - 2 * p + 1 + rank)
    drain = [b_down, w_down, f_up, b_up, w_up] * (after - 1) + [b_down, b_up] * rank + [b_down, w_down] * after
    count: dict[tuple[What, int], int] = {}
    for pair in (*fill, *steady, *drain, *[w_up] * rank, *[w_down] * rank):
        microbatch = count[pair] = count.get(pair, -1) + 1
        if microbatch < m:
            yield Action(*pair, microbatch)


def in_flight(kind: ScheduleKind, p: int, v: int, m: int, rank: int) -> tuple[Counts, ...]:
    """How many microbatches of each chunk hold activations at the moments that may be the fullest of a rank.

    A microbatch counts from the start of its F to the end of its B, or of its W where the backward is split: torch then
    keeps the activations, which W reads. Whatever the sizes of a microbatch's activations, the most that is held at a
    time is the largest over these counts of the sum over chunks of count x size. Left out is what no sizes make the
    largest alone: counts below others in every chunk, and those in the middle of a stretch in which one chunk fills as
    fast as another empties. The time taken does not grow with m: after three rounds nothing new happens.
    """
    size, rounds = _cycle(kind, p, m)
    if kind in ("1f1b", "zbv"):
        return _fullest(kind, p, v, min(size, 2 * p), rounds, rank)
    return _fullest(kind, p, v, size, min(rounds, 3), rank)


@cache
def _fullest(kind: ScheduleKind, p: int, v: int, size: int, rounds: int, rank: int) -> tuple[Counts, ...]:
    path = _v_path(p, size * rounds, rank) if kind == "zbv" else _loop_path(kind, p, v, size, rounds, rank)
    return _undominated(_corners(path))


def _v_path(p: int, m: int, rank: int) -> Path:
    """What is in flight after each F."""
    stages, counts, after_forward = stages_of("zbv", p, 2, rank), [0, 0], []
    for what, stage, _ in _v_order(p, m, rank):
        if what == "F":
            counts[stages.index(stage)] += 1
            after_forward.append(tuple(counts))
        elif what == "W":
            counts[stages.index(stage)] -= 1
    return np.array(after_forward)


def _loop_path(kind: ScheduleKind, p: int, v: int, size: int, rounds: int, rank: int) -> Path:
    """The same from the order of ``_loop_order``, without going through it."""
    index = np.arange(v * size * rounds)
    chunk = index // size % v
    started = np.cumsum(chunk[:, None] == np.arange(v), axis=0)
    ended = np.cumsum(np.vstack([np.zeros(v, dtype=int), v - 1 - chunk[:, None] == np.arange(v)]), axis=0)
    trailing = rank if splits_backward(kind) else 0
    passed = np.maximum(0, index - _warmup(kind, v, size, rounds, p - 1 - rank) - trailing)
    return np.asarray(started - ended[passed])


def _corners(path: Path) -> list[Counts]:
    """The points of a path without those in the middle of a straight stretch, each once."""
    steps = np.diff(path, axis=0)
    turns = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    return list(dict.fromkeys(map(tuple, path[[0, *turns, len(path) - 1]].tolist())))


def _undominated(points: Sequence[Counts]) -> tuple[Counts, ...]:
    """Those that no other one reaches in every chunk, in the order of time."""
    return tuple(
        a for a in points if not any(b != a and all(y >= x for x, y in zip(a, b, strict=True)) for b in points)
    )


class Hidden(NamedTuple):
    """How often a rank's time for each part of one microbatch does not show in the bubble."""

    forward: float
    input: float
    weight: float


class RankTimes(NamedTuple):
    """What one microbatch takes on a rank, all chunks together, in microseconds; sends belong to forward and input."""

    forward_us: float
    input_us: float
    weight_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubble:
    """The step in closed form: ``step_us``.

    With t_r the time of one microbatch on rank r, T the largest of them, and w_r its part for gradients of weights,

        step = m T + max(0, share x (sum t_r - T - weight x (p - 1) / p x sum w_r))

    has one term. It is exact on even ranks (same times for all stages) for 1f1b and interleaved, and for zero-bubble
    where W is the shortest of the three parts. ``rows`` has all terms: with the largest over them of
    ``sum of hidden x part`` in the place of ``weight x sum w_r`` it is exact for every kind on even ranks, given m >= p
    (zbv: m >= 2p - 1).
    """

    share: float
    weight: float
    rows: tuple[Hidden, ...]


def bubble_terms(kind: ScheduleKind, p: int, v: int) -> Bubble:
    """The coefficients of a schedule's bubble.

    1F1B waits for one microbatch on each other rank; chunks divide that by v (Narayanan et al. 2021, section 2.2);
    ZB-H1 fills it with W, (p - 1)(f + b - w) (Qi et al. 2023, table 1) while w <= f and w <= b. The rows beyond those
    are the longest paths through the actions of the schedules; tests hold them against the simulation.
    """
    if not splits_backward(kind):
        return Bubble(share=1 / v, weight=0.0, rows=(Hidden(0, 0, 0),))
    if kind == "zero-bubble":
        return Bubble(share=1 / v, weight=2.0, rows=(Hidden(0, 0, 2), Hidden(0, 1, 1), Hidden(1, 0, 1)))
    return Bubble(share=1 / v, weight=2.0, rows=_v_rows(p))


def _v_rows(p: int) -> tuple[Hidden, ...]:
    """What ZB-V hides: one minus the parts on each longest path, in chunk passes over p - 1."""
    n = max(1, p - 1)
    paths = (
        (0, 2 * n, -2 * n), (0, n, 0), (2 * n, 0, -2 * n - 1), (2 * n, -n, -1), (2 * n - 1, 1 - n, 0),
        (2 * n - 1, 1, -2 * n), (0, 1, n - 1), (1, 0, n - 1),
    )  # fmt: skip
    return tuple(Hidden(*(1 - passes / n for passes in path)) for path in paths)


def step_us(kind: ScheduleKind, p: int, v: int, m: int, ranks: Sequence[RankTimes]) -> float:
    """The pipeline's time for a step by all rows of ``Bubble``; the end of step is not in it.

    On uneven stages it is an estimate, and ``simulate.simulate`` is exact. For 1f1b it is an upper bound as long as the
    stages have their parts in about the same proportion; with several chunks it may be too low, by up to 3 % where
    stages differ by a tenth and 10 % where they differ by a third.
    """
    bubble = bubble_terms(kind, p, v)
    times: list[float] = [sum(rank) for rank in ranks]
    longest, total = max(times), sum(times)
    hidden = min(sum(h * part for rank in ranks for h, part in zip(row, rank, strict=True)) for row in bubble.rows)
    return m * longest + max(0.0, bubble.share * (total - longest - (p - 1) / p * hidden))
