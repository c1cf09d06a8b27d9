"""A training step played through: times of stages and a schedule in; when every action runs and what is held out.

An action starts when its rank has ended the one before and what it needs is there: F needs the F of the stage before,
B the B of the stage after (on the last stage its own F), W its own B.

Sends are exposed: they take time of the rank that sends, after the F or the B they belong to, and what they carry is
there when they end. That is how the runtime sends today, and what the closed form (``schedule.step_us``) assumes, where
the time of a rank includes its sends. Between two stages on one rank nothing is sent.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoplan.errors import InputError
from autoplan.plan.plan import ScheduleKind
from autoplan.plan.schedule import Action, What, orders

Key = tuple[What, int, int]
"""An Action as a plain tuple: equal to it, and three times faster to make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One microbatch on one virtual stage."""

    forward_us: float
    input_us: float
    """Backward without gradients of weights; recomputation is part of it."""
    weight_us: float
    send_forward_us: float = 0.0
    """To the next stage, if on another rank."""
    send_backward_us: float = 0.0
    """To the stage before, if on another rank."""
    activation_bytes: int = 0
    """Kept from the start of F to the end of B, or of W where the backward is split."""


class Span(NamedTuple):
    """When an action runs, its send included."""

    action: Action
    start_us: float
    end_us: float


class Level(NamedTuple):
    """Bytes of activations from a time on."""

    time_us: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A step as it runs, one entry per rank everywhere."""

    spans: tuple[tuple[Span, ...], ...]
    end_us: tuple[float, ...]
    """What follows the last action of the rank: gradient reduction, optimizer."""
    makespan_us: float
    """From the start of the step until every rank has ended, ``end_us`` included."""
    memory: tuple[tuple[Level, ...], ...]
    """Changes in the order of time; releases come before what starts at the same time."""

    @property
    def idle_us(self) -> tuple[float, ...]:
        """Time in which the rank waits, from the start of the step to its end."""
        busy = (sum(s.end_us - s.start_us for s in spans) for spans in self.spans)
        return tuple(self.makespan_us - b - end for b, end in zip(busy, self.end_us, strict=True))

    @property
    def bubble(self) -> tuple[float, ...]:
        """Idle share of the step, 0 to 1."""
        return tuple(idle / self.makespan_us if self.makespan_us else 0.0 for idle in self.idle_us)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes of activations at a time."""
        return tuple(max(level.num_bytes for level in levels) for levels in self.memory)


def simulate(
    kind: ScheduleKind, p: int, v: int, m: int, stages: Sequence[StageTimes], *, end_us: Sequence[float] = ()
) -> Simulation:
    """Play a step. ``stages`` are the p x v virtual stages in chain order; ``end_us`` has one time per rank, or none.

    Raises InputError where the schedule does not exist.
    """
    return play(orders(kind, p, v, m), stages, end_us=end_us)


def play(
    order: Sequence[Sequence[Action]], stages: Sequence[StageTimes], *, end_us: Sequence[float] = ()
) -> Simulation:
    """The same for any order. Raises InputError naming the actions that wait when ranks wait for each other."""
    durations = _durations(order, stages)
    spans = _run(order, len(stages), durations)
    ends = tuple(end_us) or (0.0,) * len(order)
    finish = max((ran[-1].end_us if ran else 0.0) + end for ran, end in zip(spans, ends, strict=True))
    last: What = "W" if _splits(order) else "B"
    memory = tuple(tuple(_memory(ran, stages, last)) for ran in spans)
    return Simulation(spans=spans, end_us=ends, makespan_us=finish, memory=memory)


def _splits(order: Sequence[Sequence[Action]]) -> bool:
    return any(action.what == "W" for actions in order for action in actions)


def _durations(order: Sequence[Sequence[Action]], stages: Sequence[StageTimes]) -> Mapping[What, list[float]]:
    """How long each kind of action holds the rank of each stage."""
    holder = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    leaves = [holder.get(k) != holder.get(k + 1) for k in range(len(stages) - 1)]
    forward = [t.forward_us + t.send_forward_us * sends for t, sends in zip(stages, [*leaves, False], strict=True)]
    inputs = [t.input_us + t.send_backward_us * sends for t, sends in zip(stages, [False, *leaves], strict=True)]
    weight = [t.weight_us for t in stages]
    if _splits(order):
        return {"F": forward, "B": inputs, "W": weight}
    return {"F": forward, "B": [i + w for i, w in zip(inputs, weight, strict=True)]}


def _run(
    order: Sequence[Sequence[Action]], num_stages: int, durations: Mapping[What, list[float]]
) -> tuple[tuple[Span, ...], ...]:
    """Every action as early as it can run; each rank goes on until it waits, turn after turn."""
    ends: dict[Key, float] = {}
    spans: list[list[Span]] = [[] for _ in order]
    ran, total = 0, sum(map(len, order))
    while ran < total:
        before = ran
        for actions, done in zip(order, spans, strict=True):
            ran += _advance(actions, done, ends, num_stages, durations)
        if ran == before:
            raise InputError(_deadlock(order, spans, ends, num_stages))
    return tuple(map(tuple, spans))


def _advance(
    actions: Sequence[Action],
    done: list[Span],
    ends: dict[Key, float],
    num_stages: int,
    durations: Mapping[What, list[float]],
) -> int:
    """Run what can run on one rank now, and say how much that was."""
    first, now = len(done), done[-1].end_us if done else 0.0
    for index in range(first, len(actions)):
        action = actions[index]
        need = _need(action, num_stages)
        ready = ends.get(need) if need else 0.0
        if ready is None:
            return index - first
        start = max(now, ready)
        now = ends[action] = start + durations[action.what][action.stage]
        done.append(Span(action, start, now))
    return len(actions) - first


def _need(action: Action, num_stages: int) -> Key | None:
    """What must have run before an action. Where that is the B of the next stage, the stage's own F has run as well."""
    what, stage, microbatch = action
    if what == "F":
        return ("F", stage - 1, microbatch) if stage else None
    if what == "W":
        return ("B", stage, microbatch)
    return ("B", stage + 1, microbatch) if stage < num_stages - 1 else ("F", stage, microbatch)


def _deadlock(
    order: Sequence[Sequence[Action]], spans: Sequence[Sequence[Span]], ends: Mapping[Key, float], num_stages: int
) -> str:
    waiting = []
    for rank, (actions, done) in enumerate(zip(order, spans, strict=True)):
        if len(done) < len(actions):
            need = _need(actions[len(done)], num_stages)
            assert need and need not in ends, "an action that waits for nothing runs"
            waiting.append(f"rank {rank} waits with {actions[len(done)]} for {Action(*need)}")
    return f"the order of actions never ends: {'; '.join(waiting)}"


def _memory(spans: Iterable[Span], stages: Sequence[StageTimes], last: What) -> Iterator[Level]:
    """The bytes held after each change, from none at the start."""
    held = 0
    yield Level(0.0, held)
    for action, start, end in spans:
        if action.what == "F":
            held += stages[action.stage].activation_bytes
            yield Level(start, held)
        elif action.what == last:
            held -= stages[action.stage].activation_bytes
            yield Level(end, held)
