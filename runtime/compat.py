"""Private torch names used at run time, each with its reason. Tried with torch 2.13; tests/runtime/test_compat.py
fails when one of them moves.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "COLLECTIVE_NAMESPACE",
    "StridedShard",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
]
# StridedShard: the only DTensor placement for a dim that is split within blocks; it has no public name.

COLLECTIVE_NAMESPACE = "_c10d_functional"
"""Namespace of the functional collectives. The public ones of torch.distributed write into buffers, which keeps
torch.compile from scheduling them; torch.distributed._functional_collectives wraps results in a tensor subclass.
"""

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, reduce: Literal["sum", "max"], group: ProcessGroup) -> Tensor:
    """Reduce over the group; every rank gets the whole result. ``x`` is contiguous."""
    return _wait(_ops.all_reduce(x, reduce, group.group_name))


def all_gather(x: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """Join the equally shaped ``x`` of ``size`` ranks along dim 0. ``x`` is contiguous."""
    return _wait(_ops.all_gather_into_tensor(x, size, group.group_name))


def reduce_scatter(x: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """Sum over the group and keep this rank's one of ``size`` equal parts along dim 0. ``x`` is contiguous."""
    return _wait(_ops.reduce_scatter_tensor(x, "sum", size, group.group_name))


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Send ``sent[i]`` elements of the flat ``x`` to rank i; get ``received[i]`` from it, in order of ranks."""
    return _wait(_ops.all_to_all_single(x, received, sent, group.group_name))


def _wait(x: Tensor) -> Tensor:
    waited = _ops.wait_tensor(x)
    assert isinstance(waited, Tensor)
    return waited
