"""Parameters that several pipeline stages hold a copy of: their gradients are summed before clip and step."""

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.plan.plan import Plan
from autoplan.runtime.data import StageModule
from autoplan.runtime.mesh import RankMesh


def stages_of_params(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter."""
    found: dict[str, tuple[int, ...]] = {}
    for index, stage in enumerate(plan.stages):
        for name in dict.fromkeys(n for names in plan.segment_params[stage.start : stage.end] for n in names):
            found[name] = (*found.get(name, ()), index)
    return found


class TiedParams:
    """Which parameters of this stage others hold too, and the ranks that hold the same part of them."""

    def __init__(self, plan: Plan, ranks: RankMesh) -> None:
        """Collective: every rank must build it, since it makes process groups."""
        holders = {name: stages for name, stages in stages_of_params(plan).items() if len(stages) > 1}
        groups = {stages: _group(plan, ranks, stages) for stages in sorted(set(holders.values()))}
        here = ranks.pp.coordinate
        self._groups = {name: groups[stages] for name, stages in sorted(holders.items()) if here in stages}
        self.counted_elsewhere = frozenset(name for name in self._groups if holders[name][0] != here)
        """Names that another stage answers for in a global norm."""

    def sum(self, grads: dict[str, Tensor], stage: StageModule) -> dict[str, Tensor]:
        """All-reduce the gradients of tied parameters over the stages that hold them, in place.

        A stage that made none adds zeros; one more element says whether any stage made one.
        """
        for name, group in self._groups.items():
            like = stage.local_state(name)
            mine = grads.get(name)
            made = like.new_ones(1) if mine is not None else like.new_zeros(1)
            flat = torch.cat([(torch.zeros_like(like) if mine is None else mine).reshape(-1), made])
            dist.all_reduce(flat, group=group)
            if flat[-1].item() > 0:
                grads[name] = flat[:-1].view_as(like)
        return grads


def _group(plan: Plan, ranks: RankMesh, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of this rank among the holders; all groups are made on all ranks, as torch wants it."""
    mine = None
    for dp in range(plan.mesh.size("dp")):
        for tp in range(plan.mesh.size("tp")):
            members = [int(ranks.mesh.mesh[stage, dp, tp]) for stage in stages]
            group = dist.new_group(members)
            if (dp, tp) == (ranks.dp.coordinate, ranks.tp.coordinate) and ranks.pp.coordinate in stages:
                mine = group
    return mine
