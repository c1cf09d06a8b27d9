"""What data ranks do together for the parameters they share: the collectives of each data mode.

replicate   gradients are all-reduced once a step
zero1       once a step gradients are reduce-scattered, and updated parameters all-gathered
zero2       gradients are reduce-scattered after each microbatch, parameters all-gathered once a step
shard       parameters are all-gathered before forward and before backward of each microbatch, gradients are
            reduce-scattered once a step (FSDP2). What cannot be split is all-reduced

Where states are split over only some data ranks (hybrid), each rank's part of the gradients is then all-reduced over
the copies. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020); Zhao et
al., "PyTorch FSDP" (2023). Prices and counts of a plan both follow from the list made here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autoplan.cluster import Group
from autoplan.plan.memory import ParamBytes
from autoplan.sharding import CollectiveKind
from autoplan.solver.setting import Setting

When = Literal["forward", "backward", "last backward", "end"]
"""With every forward or backward pass, with the last backward pass of a step, or after it."""

_AR, _AG, _RS = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective of one rank; ``axis`` as in ``CollectiveCount``."""

    axis: str
    kind: CollectiveKind
    num_bytes: int
    group: Group
    when: When

    def count(self, num_microbatches: int) -> int:
        """How often it happens in a step."""
        return num_microbatches if self.when in ("forward", "backward") else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Who shares a set of parameters: all ranks that hold them, those that share one copy, one rank per copy."""

    everyone: Group
    shard: Group
    replicas: Group
    all_axis: str
    shard_axis: str
    replica_axis: str = "replicas"


def sharing(setting: Setting, is_expert: bool) -> Sharing:
    """Who shares experts, or all other parameters."""
    groups = setting.groups
    if is_expert and setting.point.expert > 1:
        return Sharing(
            everyone=groups.expert_data,
            shard=groups.expert_shard,
            replicas=groups.expert_replicas,
            all_axis="experts",
            shard_axis="experts",
        )
    return Sharing(everyone=groups.data, shard=groups.shard, replicas=groups.replicas, all_axis="dp", shard_axis="dp")


def data_collectives(setting: Setting, params: ParamBytes, alone: ParamBytes, who: Sharing) -> tuple[Issued, ...]:
    """Collectives for one set of parameters; ``alone`` are those of it that are gathered around one segment."""
    found = (issued for issued in _all(setting, params, alone, who) if issued.num_bytes and issued.group.size > 1)
    return tuple(found)


def _all(setting: Setting, params: ParamBytes, alone: ParamBytes, who: Sharing) -> Iterator[Issued]:
    summed = setting.sum_bytes
    kept = summed(params.kept_trainable)
    copies = Issued(axis=who.replica_axis, kind=_AR, num_bytes=kept, group=who.replicas, when="end")
    match setting.point.data:
        case "replicate":
            yield Issued(
                axis=who.all_axis, kind=_AR, num_bytes=summed(params.trainable), group=who.everyone, when="end"
            )
        case "zero1" | "zero2":
            each = setting.point.data == "zero2"
            yield Issued(
                axis=who.shard_axis,
                kind=_RS,
                num_bytes=summed(params.trainable),
                group=who.shard,
                when="backward" if each else "end",
            )
            yield copies
            yield Issued(axis=who.shard_axis, kind=_AG, num_bytes=params.trainable, group=who.shard, when="end")
        case "shard":
            yield from gathered(setting, alone, who)
            stuck = params.trainable - params.gathered_trainable
            yield Issued(axis=who.all_axis, kind=_AR, num_bytes=summed(stuck), group=who.everyone, when="end")
            split = summed(params.kept_trainable - stuck)
            yield Issued(axis=who.replica_axis, kind=_AR, num_bytes=split, group=who.replicas, when="end")


def gathered(setting: Setting, params: ParamBytes, who: Sharing) -> Iterator[Issued]:
    """Around the use of parameters in mode "shard"."""
    for when in ("forward", "backward"):
        yield Issued(axis=who.shard_axis, kind=_AG, num_bytes=params.gathered, group=who.shard, when=when)
    yield Issued(
        axis=who.shard_axis,
        kind=_RS,
        num_bytes=setting.sum_bytes(params.gathered_trainable),
        group=who.shard,
        when="last backward",
    )


def time_us(setting: Setting, issued: tuple[Issued, ...], when: When) -> float:
    """Time of one round of the collectives of one moment."""
    return sum(setting.collective_us(i.kind, i.num_bytes, i.group) for i in issued if i.when == when)
