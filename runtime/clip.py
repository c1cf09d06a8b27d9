"""Gradient clipping by the true global norm, whatever the plan."""

import math
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
    norm_type = float(norm_type)
    if norm_type <= 0:
        raise InputError(f"norm_type must be above 0 (inf for the largest element), found {norm_type}")
    params = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    grads = [(p.grad, _weight(p)) for p in params if p.grad is not None]
    norm = _global_norm(grads, norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad, _ in grads:
        local = grad.to_local() if isinstance(grad, DTensor) else grad
        local.mul_(scale.to(local.dtype))
    return norm


def _global_norm(grads: list[tuple[Tensor, float]], norm_type: float) -> Tensor:
    """In float64, which all ranks agree on whatever they hold; the maximum and whether any is nan travel together."""
    device = grads[0][0].device if grads else torch.device(_group_device())
    locals_ = [(g.to_local() if isinstance(g, DTensor) else g, weight) for g, weight in grads]
    counted = [(g, weight) for g, weight in locals_ if g.numel() and weight]
    if norm_type == math.inf:
        largest = [g.abs().max().double() for g, _ in counted]
        top = torch.stack(largest).max() if largest else torch.zeros((), dtype=torch.float64, device=device)
        pair = torch.stack([top.nan_to_num(0.0, posinf=math.inf), top.isnan().double()])
        dist.all_reduce(pair, op=dist.ReduceOp.MAX)
        return torch.where(pair[1] > 0, torch.nan, pair[0])
    total = torch.zeros((), dtype=torch.float64, device=device)
    for g, weight in counted:
        total += torch.linalg.vector_norm(g.double(), norm_type) ** norm_type * weight
    dist.all_reduce(total)
    return total ** (1.0 / norm_type)


def _group_device() -> str:
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


def _weight(param: nn.Parameter) -> float:
    """One over the number of ranks that hold each element; 0 when another stage answers for it."""
    share = getattr(param, NORM_SHARE, None)
    if not isinstance(share, float):
        raise InputError("clip_grad_norm_ wants parameters of a model that autoplan.compile returned")
    return share
