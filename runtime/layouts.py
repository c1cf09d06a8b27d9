"""autoplan placements <-> DTensor placements: the single meeting point."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autoplan.runtime.compat import StridedShard
from autoplan.sharding import Partial, Placement, Replicate, Shard, local_range


def to_torch(placement: Placement) -> TorchPlacement:
    """The DTensor placement of a state (a parameter or its gradient); a Partial is not a state."""
    match placement:
        case Shard(dim=dim, blocks=1):
            return TorchShard(dim)
        case Shard(dim=dim, blocks=blocks):
            return StridedShard(dim, split_factor=blocks)
        case Replicate():
            return TorchReplicate()
        case Partial():
            raise AssertionError("a parameter is never stored as a Partial")


def local_part(whole: Tensor, placement: Placement, degree: int, coordinate: int) -> Tensor:
    """One rank's part of a tensor along one axis, as a view where it can be one."""
    if degree == 1 or not isinstance(placement, Shard):
        return whole
    parts = []
    for block in whole.chunk(placement.blocks, placement.dim):
        start, end = local_range(block.shape[placement.dim], degree, coordinate)
        parts.append(block.narrow(placement.dim, start, end - start))
    return parts[0] if len(parts) == 1 else torch.cat(parts, placement.dim)


def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: tuple[TorchPlacement, ...], shape: tuple[int, ...]
) -> DTensor:
    """Wrap a local part; ``shape`` is the global one. No communication and no check across ranks."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
