"""Counts the collectives that torch's dispatcher sees in one training step, by mesh axis and kind."""

from collections import Counter

import torch
import torch.distributed as dist
import zoo
from multiproc.oracle_jobs import loss_of
from torch.utils._python_dispatch import TorchDispatchMode

import autoplan

KINDS = {
    "all_reduce": "all_reduce", "allreduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "_allgather_base_": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter", "all_to_all_single": "all_to_all", "broadcast_": "broadcast",
    "send": "send", "recv_": "recv",
}  # fmt: skip
SILENT = {"wait_tensor"}


class Counter_(TorchDispatchMode):
    """Sees every op of the c10d namespaces, forward and backward."""

    def __init__(self, axis_of: dict[str, str]) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, str]] = Counter()
        self._axis_of = axis_of

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


def count(name: str, plan: autoplan.Plan, batch_size: int) -> tuple[int, dict[tuple[str, str], int]]:
    """This rank's stage, and what it issued in its second step (the first also agrees on shapes)."""
    with zoo.InFloat64():
        model = autoplan.compile(zoo.build(name), plan)
        inputs = zoo.ZOO[name].batch(batch_size, 0)
        loss_of(model(**inputs)).backward()
        ranks = model._ranks
        axis_of = {getattr(ranks, axis).group.group_name: axis for axis in ("pp", "dp", "tp")}
        axis_of |= {group.group_name: "tied" for group in model._tied._groups.values()}
        with Counter_(axis_of) as counter:
            loss_of(model(**inputs)).backward()
    return ranks.pp.coordinate, dict(counter.seen)
