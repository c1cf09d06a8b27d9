"""The best candidates played through action by action: the closed form ranks thousands, the replay the last few.

The closed form is exact on even ranks. Uneven stages wait for each other in ways that only the order of the schedule
tells, so of the candidates that the closed form cannot tell apart the fastest in replay is the answer.
"""

from collections.abc import Sequence

from autoplan.plan.simulate import StageTimes, simulate
from autoplan.solver.stagecost import StageCost
from autoplan.solver.step import Step, ranks_of

MOST_REPLAYED = 4
NEAR = 1e-3
"""Steps this close by the closed form are as good as equal."""
_MOST_ACTIONS = 150_000
"""Beyond so many actions a replay takes seconds; the closed form stands."""


def replayed_us(step: Step) -> float:
    """Time of the step by event simulation, the loss's sums included; the closed form where the step is too long."""
    point = step.setting.point
    if 3 * point.num_stages * point.num_microbatches > _MOST_ACTIONS:
        return step.total_us
    ends = [sum(step.stages[s].end_us for s in mine) for mine in ranks_of(point)]
    played = simulate(
        point.schedule, point.pp, point.chunks, point.num_microbatches, list(map(_times, step.stages)), end_us=ends
    )
    return played.makespan_us


def _times(stage: StageCost) -> StageTimes:
    forward, backward = stage.send_us
    return StageTimes(
        forward_us=stage.forward_us - forward,
        input_us=stage.backward_us - stage.weight_us - backward,
        weight_us=stage.weight_us,
        send_forward_us=forward,
        send_backward_us=backward,
    )


def fastest_in_replay(steps: Sequence[Step]) -> Step:
    """Of the first few steps that the closed form cannot tell from the first, the one that replays fastest."""
    near = [step for step in steps[:MOST_REPLAYED] if step.total_us * (1 - NEAR) <= steps[0].total_us]
    if len(near) == 1:
        return near[0]
    return min(near, key=replayed_us)
