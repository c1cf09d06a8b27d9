"""Counts the collectives that torch's dispatcher sees, by mesh axis and kind."""

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "all_reduce": "all_reduce", "allreduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "all_to_all_single": "all_to_all", "broadcast_": "broadcast",
    "send": "send", "recv_": "recv",
}  # fmt: skip
SILENT = {"wait_tensor"}


class CollectiveCounter(TorchDispatchMode):
    """Sees every op of the c10d namespaces, forward and backward, that a compiled model's groups run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()
        ranks = model._ranks
        self._axis_of = {getattr(ranks, axis).group.group_name: axis for axis in ("pp", "dp", "tp")}
        self._axis_of |= {group.group_name: "tied" for group in model._tied._groups.values()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__
            if name not in SILENT:
                self.seen[self._axis_of[_group_name(args)], KINDS[name]] += 1
        return func(*args, **(kwargs or {}))


def _group_name(args: tuple[object, ...]) -> str:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).group_name
    return next(arg for arg in reversed(args) if isinstance(arg, str))
