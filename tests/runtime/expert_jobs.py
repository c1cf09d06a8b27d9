"""What each rank does in test_expert_exchange.py; a pool of ranks imports this by name."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import autoplan.trace.experts_op  # noqa: F401, registers the op
from autoplan.ir import OpNode, Ref, TensorMeta
from autoplan.runtime.layouts import local_part
from autoplan.runtime.local_ops import LocalAxis, LocalUse, local_call
from autoplan.sharding import Placement, Shard

SPLIT = {0: Shard(0), 1: Shard(0), 2: Shard(0), 3: Shard(0), 4: Shard(0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    tokens: int
    experts: int
    popular: bool = False
    """All tokens choose the first experts, so that some ranks get no row."""
    lost: bool = False
    """One slot has no expert."""


def operands_of(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    chosen = [torch.randperm(case.experts, generator=generator)[:2] for _ in range(case.tokens)]
    index = torch.tensor([[1, 0]] * case.tokens) if case.popular else torch.stack(chosen)
    if case.lost:
        index[0, 1] = case.experts
    weights = torch.rand(case.tokens, 2, dtype=torch.float64, generator=generator)
    return [draw(case.tokens, 4), index, weights, draw(case.experts, 6, 4), draw(case.experts, 4, 3)]


def exchanged_experts(case: Case) -> str:
    """Compare this rank's part of result and gradients with the whole op; return the collectives each way."""
    from torch.distributed.tensor.debug import CommDebugMode

    size, rank = dist.get_world_size(), dist.get_rank()
    whole = [x.requires_grad_(x.is_floating_point()) for x in operands_of(case)]
    local = [mine(x.detach(), SPLIT[i], size, rank) for i, x in enumerate(whole)]
    names = tuple("abcde")
    node = OpNode(
        name="n", op="autoplan.experts.default", args=(*map(Ref, names), "silu", case.experts),
        outputs=(TensorMeta(shape=(case.tokens, 4), dtype="float64"),),
    )  # fmt: skip
    use = LocalUse(
        node=node,
        shapes=tuple(tuple(x.shape) for x in whole),
        batch=LocalAxis(size=1, coordinate=0, group=None, form=""),
        tensor=LocalAxis(size=size, coordinate=rank, group=dist.group.WORLD, form="experts_exchange"),
        device=torch.device("cpu"),
    )
    expected = torch.ops.autoplan.experts(*whole, "silu", case.experts)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    expected.backward(upstream)
    with CommDebugMode() as forward:
        found = local_call(use, tuple(local))
    with CommDebugMode() as backward:
        found.backward(local_part(upstream, Shard(0), size, rank))
    same(found.detach(), local_part(expected.detach(), Shard(0), size, rank))
    for i, (x, part) in enumerate(zip(whole, local, strict=True)):
        if x.grad is not None:
            assert part.grad is not None
            same(part.grad, local_part(x.grad, SPLIT[i], size, rank))
    return " / ".join(str(mode.get_total_counts()) for mode in (forward, backward))


def mine(x: Tensor, placement: Placement, size: int, rank: int) -> Tensor:
    return local_part(x, placement, size, rank).clone().requires_grad_(x.is_floating_point())


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
