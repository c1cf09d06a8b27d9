"""Model outputs put together on every rank, after an evaluation."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autoplan.plan.place import PlacedValue
from autoplan.runtime.collectives import AxisGroup, redistribute
from autoplan.runtime.mesh import RankMesh
from autoplan.sharding import REPLICATE, Partial, Replicate, Shard, local_shape


def gather_output(value: PlacedValue, parts: int, pieces: Sequence[Tensor], ranks: RankMesh) -> Tensor:
    """Whole output on every rank from one piece per microbatch; ``pieces`` is read on the last stage only."""
    last = ranks.pp.size - 1
    if ranks.pp.coordinate == last:
        shape = local_shape(value.meta.shape, value.batch, parts, 0)
        whole = _join(value, [redistribute(p, value.tensor, REPLICATE, ranks.tp, shape) for p in pieces], ranks.dp)
    else:
        whole = torch.empty(value.meta.shape, dtype=getattr(torch, value.meta.dtype), device=ranks.device)
    if ranks.pp.size > 1:
        whole = whole.contiguous()
        dist.broadcast(whole, group=ranks.pp.group, group_src=last)
    return whole


def _join(value: PlacedValue, pieces: Sequence[Tensor], dp: AxisGroup) -> Tensor:
    match value.batch:
        case Replicate():
            return pieces[0]
        case Partial():
            total = torch.stack(list(pieces)).sum(0)
            return redistribute(total, value.batch, REPLICATE, dp, value.meta.shape)
        case Shard(dim=dim):
            return redistribute(torch.cat(list(pieces), dim), value.batch, REPLICATE, dp, value.meta.shape)
