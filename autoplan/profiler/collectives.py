"""A collective -> something to run on all ranks: the calls that the runtime makes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from autoplan.profiler.cases import Overlap, Transfer, groups, members
from autoplan.profiler.timing import Run
from autoplan.runtime import compat
from autoplan.sharding import CollectiveKind

_PIECE = 256
"""Side of the product that each rank computes before a collective inside compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks that measure together. ``groups`` by size and ranks in a node: the one that this rank is in."""

    rank: int
    size: int
    per_node: int
    device: torch.device
    groups: dict[tuple[int, int], tuple[ProcessGroup, int]]
    """Group, and this rank's place in it."""

    def most(self, values: Sequence[float]) -> list[float]:
        """Of each value, the largest of all ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def least(self, values: Sequence[float]) -> list[float]:
        """Of each value, the smallest of all ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def mean(self, value: float) -> float:
        """Over the ranks; infinite where one of them is."""
        return self._reduced([value], dist.ReduceOp.SUM)[0] / self.size

    def _reduced(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, how)
        return [float(value) for value in tensor.tolist()]

    def wait(self) -> None:
        """Start together."""
        if self.size > 1:
            dist.barrier()


def make_world(device: torch.device) -> World:
    """Groups of every size that is measured, among the ranks that run."""
    if not dist.is_initialized():
        return World(rank=0, size=1, per_node=1, device=device, groups={})
    size, rank = dist.get_world_size(), dist.get_rank()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    found: dict[tuple[int, int], tuple[ProcessGroup, int]] = {}
    for ranks, in_node in groups(size, per_node):
        for ids in members(size, ranks, in_node, per_node):
            group = dist.new_group(ids)
            if rank in ids:
                found[ranks, in_node] = group, ids.index(rank)
    return World(rank=rank, size=size, per_node=per_node, device=device, groups=found)


def make_transfer(case: Transfer | Overlap, world: World) -> tuple[Run, Run]:
    """What to time, and what to run before it each time: for a collective inside compute, a product; or nothing."""
    if isinstance(case, Overlap):
        return _overlap(case, world), world.wait
    run = _transfer(case, world)
    if not case.inside:
        return run, _nothing
    left, right = (torch.randn(_PIECE, _PIECE, device=world.device) for _ in range(2))
    return run, lambda: left @ right


def _nothing() -> None:
    pass


def all_must_end(case: Transfer | Overlap) -> bool:
    """Whether a rank may be done with it before another has all of it; else each waits for all the others."""
    return isinstance(case, Overlap) or case.kind is CollectiveKind.BROADCAST


def _overlap(case: Overlap, world: World) -> Run:
    """All ranks start together; the collective goes on behind the products."""
    group, _ = world.groups[case.ranks, case.per_node]
    whole = torch.zeros(case.num_bytes // 4, device=world.device)
    dtype = getattr(torch, case.dtype)
    left, right = (torch.randn(case.side, case.side, device=world.device).to(dtype) for _ in range(2))

    def compute() -> None:
        for _ in range(case.products):
            left @ right

    def both() -> None:
        pending = dist.all_reduce(whole, group=group, async_op=True)
        compute()
        assert pending is not None
        pending.wait()

    match case.part:
        case "transfer":
            return lambda: dist.all_reduce(whole, group=group)
        case "compute":
            return compute
        case "both":
            return both
        case _:
            assert_never(case.part)


def _transfer(case: Transfer, world: World) -> Run:
    group, place = world.groups[case.ranks, case.per_node]
    count, ranks = max(case.ranks, case.num_bytes // 4) // case.ranks, case.ranks
    part = torch.zeros(count, device=world.device)
    whole = torch.zeros(count * ranks, device=world.device)
    match case.kind:
        case CollectiveKind.ALL_REDUCE:
            return lambda: compat.all_reduce(whole, "sum", group)
        case CollectiveKind.ALL_GATHER:
            return lambda: compat.all_gather(part, ranks, group)
        case CollectiveKind.REDUCE_SCATTER:
            return lambda: compat.reduce_scatter(whole, ranks, group)
        case CollectiveKind.ALL_TO_ALL:
            return lambda: compat.all_to_all(whole, [count] * ranks, [count] * ranks, group)
        case CollectiveKind.BROADCAST:
            return lambda: dist.broadcast(whole, group=group, group_src=0)
        case CollectiveKind.SEND | CollectiveKind.RECV:
            return lambda: _there_or_back(whole, group, place)
        case _:
            assert_never(case.kind)


def _there_or_back(message: torch.Tensor, group: ProcessGroup, place: int) -> None:
    """The first rank sends and the second one answers: two messages, of which one is timed (see ``messages``)."""
    if place == 0:
        dist.send(message, group=group, group_dst=1)
        dist.recv(message, group=group, group_src=1)
    else:
        dist.recv(message, group=group, group_src=0)
        dist.send(message, group=group, group_dst=0)


def messages(case: Transfer | Overlap) -> int:
    """Collectives, one after the other, in what is timed."""
    return 2 if isinstance(case, Transfer) and case.kind is CollectiveKind.SEND else 1
