"""The pipeline's step in time, for pictures: a plan in, the start and end of every pass out.

The plan's schedule is played through by ``plan.simulate``. Sends take no time of their own here: the stages' times
include it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autoplan.plan.plan import Plan
from autoplan.plan.schedule import What
from autoplan.plan.simulate import Span, StageTimes
from autoplan.plan.simulate import simulate as play

Direction = Literal["forward", "backward", "weight"]
DIRECTIONS: dict[What, Direction] = {"F": "forward", "B": "backward", "W": "weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One stage at work on one microbatch; ``weight`` is the gradient of its weights where the backward is split."""

    stage: int
    chunk: int
    """Which of the stages of its place it is."""
    microbatch: int
    direction: Direction
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All passes of a step, place by place in running order; ``end_us`` is the end of the last one."""

    passes: tuple[tuple[Pass, ...], ...]
    """One tuple per place on the pp axis."""
    chunks: int
    """Stages of a place."""
    end_us: float
    step_us: float
    """The plan's predicted step; what exceeds ``end_us`` is outside the pipeline (gradient reduction, optimizer)."""

    def idle_us(self, place: int) -> float:
        """Time that the place waits between the start of the step and the end of the last pass."""
        return self.end_us - sum(p.end_us - p.start_us for p in self.passes[place])

    @property
    def row_names(self) -> tuple[str, ...]:
        """What each row is: a stage, or a place that holds several."""
        word = "stage" if self.chunks == 1 else "place"
        return tuple(f"{word} {place}" for place in range(len(self.passes)))

    @property
    def splits_backward(self) -> bool:
        """Whether there are passes for gradients of weights."""
        return any(p.direction == "weight" for p in self.passes[0])


def simulate(plan: Plan) -> Timeline:
    """Play the step of a plan from its stages' times. Raises InputError where its schedule does not exist."""
    stages = [
        StageTimes(forward_us=s.forward_us, input_us=s.backward_us - s.weight_us, weight_us=s.weight_us)
        for s in plan.stages
    ]
    pp = plan.mesh.size("pp")
    step = play(plan.schedule, pp, plan.chunks, plan.num_microbatches, stages)
    passes = tuple(tuple(_passes(spans)) for spans in step.spans)
    end_us = step.makespan_us
    return Timeline(passes=passes, chunks=plan.chunks, end_us=end_us, step_us=max(plan.step.total, end_us))


def _passes(spans: tuple[Span, ...]) -> Iterator[Pass]:
    held = sorted({span.action.stage for span in spans})
    chunk_of = {stage: chunk for chunk, stage in enumerate(held)}
    for (what, stage, microbatch), start_us, end_us in spans:
        yield Pass(
            stage=stage, chunk=chunk_of[stage], microbatch=microbatch, direction=DIRECTIONS[what],
            start_us=start_us, end_us=end_us,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A span of time that is shown."""

    start_us: float
    end_us: float


def shown_windows(timeline: Timeline, least_passes: int = 24) -> tuple[Window, ...]:
    """The whole step, or its beginning and its end when there are too many passes to see.

    ``least_passes`` forward passes of a place with their backward passes are always shown, half at each end, and more
    where the pipeline takes longer to fill and to drain.
    """
    forward = sum(p.direction == "forward" for p in timeline.passes[0])
    busiest = max(timeline.end_us - timeline.idle_us(place) for place in range(len(timeline.passes)))
    pair = busiest / forward
    shown = max(least_passes / 2 * pair, max(_filled_us(timeline), _draining_us(timeline)) + 4 * pair)
    if 2 * shown >= timeline.end_us:
        return (Window(start_us=0.0, end_us=timeline.step_us),)
    return (
        Window(start_us=0.0, end_us=shown),
        Window(start_us=timeline.end_us - shown, end_us=timeline.step_us),
    )


def _filled_us(timeline: Timeline) -> float:
    """Until when a place waits for its first backward pass."""
    return max(next(p.start_us for p in passes if p.direction == "backward") for passes in timeline.passes)


def _draining_us(timeline: Timeline) -> float:
    """For how long a place has had its last forward pass when the pipeline ends."""
    ends = [next(p.end_us for p in reversed(passes) if p.direction == "forward") for passes in timeline.passes]
    return timeline.end_us - min(ends)
