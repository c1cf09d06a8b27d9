"""Which stages lie on which rank, and what they hold in flight, computed once for each schedule."""

from functools import cache, lru_cache

from autoplan.plan.plan import ScheduleKind
from autoplan.plan.schedule import in_flight, stages_of


@cache
def ranks_of(schedule: ScheduleKind, pp: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Stages of each rank of the pipeline."""
    return tuple(stages_of(schedule, pp, chunks, rank) for rank in range(pp))


@lru_cache(maxsize=4096)
def flying_of(
    schedule: ScheduleKind, pp: int, chunks: int, num_microbatches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Per rank: microbatches that its chunks hold, at the moments that may be the fullest."""
    return tuple(in_flight(schedule, pp, chunks, num_microbatches, rank) for rank in range(pp))
