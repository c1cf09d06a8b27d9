"""The pipeline's step in time: stage times and a schedule in, the start and end of every pass out.

Each stage runs its passes in the order of 1F1B: min(m, p - 1 - s) forward passes to fill the pipeline, then one forward
and one backward in turn, then the backward passes that are left. A forward pass waits for the same microbatch on the
stage before, a backward pass for the stage after. Sends take no time of their own here: the stages' times include it.
"""

from dataclasses import dataclass
from typing import Literal

from autoplan.plan.plan import Plan

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One stage at work on one microbatch."""

    stage: int
    microbatch: int
    direction: Direction
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All passes of a step, stage by stage in running order; ``end_us`` is the end of the last one."""

    passes: tuple[tuple[Pass, ...], ...]
    """One tuple per stage."""
    end_us: float
    step_us: float
    """The plan's predicted step; what exceeds ``end_us`` is outside the pipeline (gradient reduction, optimizer)."""

    def idle_us(self, stage: int) -> float:
        """Time that the stage waits between the start of the step and the end of the last pass."""
        return self.end_us - sum(p.end_us - p.start_us for p in self.passes[stage])


def pass_order(num_stages: int, stage: int, num_microbatches: int) -> tuple[tuple[Direction, int], ...]:
    """Direction and microbatch of each pass of a stage, in running order."""
    warmup = min(num_microbatches, num_stages - 1 - stage)
    order: list[tuple[Direction, int]] = [("forward", i) for i in range(warmup)]
    for i in range(num_microbatches - warmup):
        order += [("forward", warmup + i), ("backward", i)]
    return (*order, *(("backward", i) for i in range(num_microbatches - warmup, num_microbatches)))


def simulate(plan: Plan) -> Timeline:
    """Replay the 1F1B step of a plan from its stages' forward and backward times."""
    num_stages = len(plan.stages)
    waiting = [list(pass_order(num_stages, s, plan.num_microbatches)) for s in range(num_stages)]
    for order in waiting:
        order.reverse()
    ends: dict[tuple[int, Direction, int], float] = {}
    done: list[list[Pass]] = [[] for _ in range(num_stages)]
    while any(waiting):
        before = len(ends)
        for stage, order in enumerate(waiting):
            while order and (ready := _ready_us(ends, num_stages, stage, order[-1])) is not None:
                direction, microbatch = order.pop()
                start = max(ready, done[stage][-1].end_us if done[stage] else 0.0)
                times = plan.stages[stage]
                end = start + (times.forward_us if direction == "forward" else times.backward_us)
                ends[stage, direction, microbatch] = end
                done[stage].append(
                    Pass(stage=stage, microbatch=microbatch, direction=direction, start_us=start, end_us=end)
                )
        assert len(ends) > before, "1F1B never waits for itself"
    end_us = max(passes[-1].end_us for passes in done)
    return Timeline(passes=tuple(map(tuple, done)), end_us=end_us, step_us=max(plan.step.total, end_us))


def _ready_us(
    ends: dict[tuple[int, Direction, int], float], num_stages: int, stage: int, step: tuple[Direction, int]
) -> float | None:
    """When the input of a pass is there; None while it is not."""
    match step:
        case ("forward", microbatch):
            return ends.get((stage - 1, "forward", microbatch)) if stage else 0.0
        case (_, microbatch):
            last = stage == num_stages - 1
            return ends.get((stage, "forward", microbatch) if last else (stage + 1, "backward", microbatch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A span of time that is shown."""

    start_us: float
    end_us: float


def shown_windows(timeline: Timeline, least_passes: int = 24) -> tuple[Window, ...]:
    """The whole step, or its beginning and its end when there are too many microbatches to see.

    ``least_passes`` pairs of passes are always shown, and more where the pipeline takes longer to fill and to drain.
    """
    most_passes = max(least_passes, 2 * len(timeline.passes) + 8)
    num_microbatches = len(timeline.passes[0]) // 2
    busiest = max(timeline.end_us - timeline.idle_us(stage) for stage in range(len(timeline.passes)))
    if num_microbatches <= most_passes or not busiest:
        return (Window(start_us=0.0, end_us=timeline.step_us),)
    shown = most_passes / 2 * busiest / num_microbatches
    return (
        Window(start_us=0.0, end_us=shown),
        Window(start_us=timeline.end_us - shown, end_us=timeline.step_us),
    )
