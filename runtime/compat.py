"""Private torch names used at run time, each with its reason. Tried with torch 2.13; tests/runtime/test_compat.py
fails when one of them moves.
"""

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed import ProcessGroup
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._pytree import tree_flatten

__all__ = [
    "COLLECTIVE_NAMESPACE",
    "OpOverload",
    "StridedShard",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "copy_of_module",
    "is_persistent",
    "reduce_scatter",
    "tree_flatten",
]
# OpOverload: the type of what a checkpoint policy is asked about.
# tree_flatten: torch's own view of nested inputs, which has no public name in torch itself.
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


def copy_of_module(
    module: nn.Module, param: Callable[[nn.Parameter], nn.Parameter], buffer: Callable[[Tensor], Tensor]
) -> nn.Module:
    """A copy with other parameters and buffers of its own and the same children. nn.Module has no public way."""
    made = copy.copy(module)
    made._parameters = {name: None if p is None else param(p) for name, p in module._parameters.items()}
    made._buffers = {name: None if b is None else buffer(b) for name, b in module._buffers.items()}
    return made


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a buffer of this module belongs into its ``state_dict``."""
    return buffer not in module._non_persistent_buffers_set
