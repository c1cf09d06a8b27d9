"""Everything one rank of a stage issues in one training step, counted from the same data that the runtime follows."""

from collections.abc import Iterable, Sequence

from autoplan.plan.plan import CollectiveCount
from autoplan.sharding import CollectiveKind
from autoplan.solver.dataranks import Issued
from autoplan.solver.setting import Setting
from autoplan.solver.stagecost import StageCost, holders, in_class, param_of
from autoplan.solver.step import loss_bytes
from autoplan.solver.update import updated_bytes

_AR = CollectiveKind.ALL_REDUCE


def stage_collectives(setting: Setting, stages: Sequence[StageCost], stage: int) -> tuple[CollectiveCount, ...]:
    """Collectives of a step by axis and kind."""
    found = [
        *_tensor(setting, stages[stage]),
        *_data(setting, stages, stage),
        *_pipeline(setting, stages[stage]),
        *_tied(setting, stages, stage),
    ]
    return merge(found)


def merge(counts: Sequence[CollectiveCount]) -> tuple[CollectiveCount, ...]:
    """Sum what has the same axis and kind."""
    totals: dict[tuple[str, CollectiveKind], tuple[int, int]] = {}
    for each in counts:
        count, num_bytes = totals.get((each.axis, each.kind), (0, 0))
        totals[each.axis, each.kind] = (count + each.count, num_bytes + each.num_bytes)
    return tuple(
        CollectiveCount(axis=axis, kind=kind, count=count, num_bytes=num_bytes)
        for (axis, kind), (count, num_bytes) in totals.items()
        if count
    )


def _tensor(setting: Setting, stage: StageCost) -> list[CollectiveCount]:
    """On the tensor and context axes."""
    m = setting.point.num_microbatches
    found = [
        CollectiveCount(axis=c.axis, kind=c.kind, count=m * c.count, num_bytes=m * c.num_bytes)
        for option in stage.options
        for c in option.cost.collectives
    ]
    sums = [segment.tensor_sum_bytes for segment in stage.segments]
    return found + [CollectiveCount(axis="tp", kind=_AR, count=1, num_bytes=size) for size in sums if size]


def _data(setting: Setting, stages: Sequence[StageCost], stage: int) -> list[CollectiveCount]:
    """What segments issue over the data ranks, what the stage gathers for several of them, and the loss."""
    mine = stages[stage]
    issued = [each for segment in mine.segments for each in (*segment.data, *segment.dispatch)]
    found = [*_counted(setting, issued), *_counted(setting, mine.held)]
    if stage == len(stages) - 1 and setting.groups.data.size > 1:
        found.append(CollectiveCount(axis="dp", kind=_AR, count=1, num_bytes=loss_bytes(setting)))
    return found


def _counted(setting: Setting, issued: Iterable[Issued]) -> list[CollectiveCount]:
    m = setting.point.num_microbatches
    return [
        CollectiveCount(axis=each.axis, kind=each.kind, count=each.count(m), num_bytes=each.count(m) * each.num_bytes)
        for each in issued
    ]


def _pipeline(setting: Setting, stage: StageCost) -> list[CollectiveCount]:
    """Values forward and gradients backward over the two cuts of a stage; then the loss."""
    if setting.point.pp == 1:
        return []
    m = setting.point.num_microbatches
    ends = [edge for edge in (stage.start, stage.end) if 0 < edge < len(setting.sg.segments)]
    count = m * sum(len(setting.cut_bytes[edge]) for edge in ends)
    num_bytes = m * sum(sum(setting.cut_bytes[edge]) for edge in ends)
    both = [
        CollectiveCount(axis="pp", kind=kind, count=count, num_bytes=num_bytes)
        for kind in (CollectiveKind.SEND, CollectiveKind.RECV)
    ]
    return [*both, CollectiveCount(axis="pp", kind=CollectiveKind.BROADCAST, count=1, num_bytes=loss_bytes(setting))]


def _tied(setting: Setting, stages: Sequence[StageCost], stage: int) -> list[CollectiveCount]:
    edges = [stages[0].start, *(s.end for s in stages)]
    held = holders(setting.sg, edges)
    mine = stages[stage]
    found = []
    for offset, names in enumerate(mine.owned):
        for name in names:
            params = param_of(setting, mine.options[offset], *in_class(setting.sg, mine.start + offset, (name,)))
            if len(held[name]) > 1 and params.trainable:
                size = setting.sum_bytes(updated_bytes(setting, params))
                found.append(CollectiveCount(axis="tied", kind=_AR, count=1, num_bytes=size))
    return found
