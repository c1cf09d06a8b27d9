"""Experts split over the ranks of an axis, tokens split over the same ranks: each token travels to its experts.

Forward: one all-to-all of how many rows go to each expert, one of the rows, one of what the experts made of them.
Backward: the last two again, the other way. A row is one token for one of its k experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from autoplan.runtime import compat
from autoplan.runtime.collectives import AxisGroup
from autoplan.sharding import local_range

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Rows (n, H), the local expert of each (n, 1) and weights (n, 1) -> (n, H)."""


def exchange_experts(
    hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute, num_experts: int, axis: AxisGroup
) -> Tensor:
    """Weighted sum over what the experts of each local token make of it.

    ``hidden`` (T, H), ``index`` and ``weights`` (T, k) are this rank's tokens; ``num_experts`` counts those of all
    ranks, which hold them in order. A slot with an index outside of them adds nothing.
    """
    assert axis.group is not None, "an exchange needs a process group"
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    numbers = torch.arange(num_experts + 1, device=flat.device, dtype=flat.dtype)
    edges = torch.searchsorted(flat[order], numbers)
    slots = order[edges[0] : edges[-1]]
    counts = edges.diff()
    owned = [end - start for start, end in (local_range(num_experts, axis.size, i) for i in range(axis.size))]
    own = owned[axis.coordinate]
    arriving = compat.all_to_all(counts, [own] * axis.size, owned, axis.group)
    sent = [int(part.sum()) for part in torch.split(counts, owned)]
    received = [int(part.sum()) for part in torch.split(arriving, own)]
    rows = _travel(hidden[slots // index.shape[1]], sent, received, axis.group)
    experts = torch.arange(own, device=flat.device).repeat(axis.size).repeat_interleave(arriving)
    made = compute(rows, experts.unsqueeze(1), rows.new_ones(rows.shape[0], 1))
    returned = _travel(made, received, sent, axis.group)
    whole = returned.new_zeros(flat.shape[0], hidden.shape[1]).index_copy(0, slots, returned)
    return (whole.view(*index.shape, -1) * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _travel(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Hand ``sent[i]`` rows to rank i and get ``received[i]`` from it, in order of ranks."""
    result: object = _Travel.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    assert isinstance(result, Tensor)
    return result


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.way_back = (received, sent, group)  # type: ignore[attr-defined]
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, *ctx.way_back), None, None, None  # type: ignore[attr-defined]


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    width = rows.shape[1]
    flat = compat.all_to_all(
        rows.reshape(-1), [count * width for count in received], [count * width for count in sent], group
    )
    return flat.view(-1, width)
