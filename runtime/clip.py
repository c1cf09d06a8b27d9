"""Gradient clipping by the true global norm, whatever the plan."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoplan.errors import InputError
from autoplan.runtime.data import NORM_SHARE


@torch.no_grad()
def clip_grad_norm_(parameters: nn.Module | Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients of a compiled model so that their norm is at most ``max_norm``; return the norm before.

    ``parameters`` is the compiled model or some of its ``parameters()``; every rank must call it with the same ones.
    Each element counts once, however many ranks hold a copy. ``norm_type`` may be ``inf``. Raises InputError when
    the parameters do not belong to a compiled model.
    """
    params = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    grads = [(p.grad, _weight(p)) for p in params if p.grad is not None]
    norm = _global_norm(grads, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad, _ in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(local.dtype))
    return norm


def _global_norm(grads: list[tuple[Tensor, float]], norm_type: float) -> Tensor:
    locals_ = [(g.to_local() if isinstance(g, DTensor) else g, weight) for g, weight in grads]
    dtype = torch.promote_types(torch.float32, locals_[0][0].dtype) if locals_ else torch.float32
    device = locals_[0][0].device if locals_ else torch.device("cpu")
    total = torch.zeros((), dtype=dtype, device=device)
    for grad, weight in locals_:
        if grad.numel() == 0 or weight == 0:
            continue
        if norm_type == float("inf"):
            total = torch.maximum(total, grad.abs().max().to(dtype))
        else:
            total += torch.linalg.vector_norm(grad, norm_type, dtype=dtype) ** norm_type * weight
    if norm_type == float("inf"):
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        return total
    dist.all_reduce(total)
    return total ** (1.0 / norm_type)


def _weight(param: nn.Parameter) -> float:
    """One over the number of ranks that hold each element; 0 when another stage answers for it."""
    share = getattr(param, NORM_SHARE, None)
    if not isinstance(share, float):
        raise InputError("clip_grad_norm_ wants parameters of a model that autoplan.compile returned")
    return share
