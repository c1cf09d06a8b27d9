"""Plan mesh -> DeviceMesh, and this rank's place on it."""

import atexit
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan.plan.plan import Plan
from autoplan.plan.runnable import refuse_what_cannot_run
from autoplan.plan.verify import verify_world_size
from autoplan.runtime.collectives import AxisGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMesh:
    """The device mesh as one rank sees it. ``pp.coordinate`` is its stage."""

    mesh: DeviceMesh
    pp: AxisGroup
    dp: AxisGroup
    tp: AxisGroup
    device: torch.device

    @property
    def state_mesh(self) -> DeviceMesh:
        """The (dp, tp) mesh on which this stage's parameters live."""
        return self.mesh["dp", "tp"]


def start_process_group() -> None:
    """Join the ranks that a launcher started, or make a group of one. Does nothing when a group exists."""
    if dist.is_initialized():
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:  # the contract of torchrun and its kin
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    atexit.register(_stop_process_group)


def _stop_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def build_mesh(plan: Plan) -> RankMesh:
    """Lay the plan's mesh over the running ranks. Raises PlanError when their number differs."""
    start_process_group()
    verify_world_size(plan, dist.get_world_size())
    refuse_what_cannot_run(plan)
    mesh = plan.mesh
    device = _rank_device()
    axes = ("pp", "dp", "tp")
    device_mesh = init_device_mesh(device.type, tuple(map(mesh.size, axes)), mesh_dim_names=axes)
    groups = {
        axis: AxisGroup(
            group=device_mesh.get_group(axis), size=mesh.size(axis), coordinate=device_mesh.get_local_rank(axis)
        )
        for axis in axes
    }
    return RankMesh(mesh=device_mesh, pp=groups["pp"], dp=groups["dp"], tp=groups["tp"], device=device)


def _rank_device() -> torch.device:
    if "nccl" not in dist.get_backend():
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    return device
