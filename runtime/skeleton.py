"""The user's module without its weights: kept to trace it again for another shape or mode."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autoplan.runtime.compat import tree_flatten


def on_meta(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device; buffers are copied, the original is left alone."""
    memo: dict[int, object] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Further names of each shared parameter, by the name that ``named_parameters`` gives it."""
    canonical = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, tuple[str, ...]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        first = canonical[id(p)]
        if name != first:
            found[first] = (*found.get(first, ()), name)
    return found


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong into a ``state_dict``."""
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in params}


def signature(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """What makes two calls traceable as one: structure, shapes and dtypes, and the values of non-tensors."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    described = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else ("value", repr(x)) for x in leaves)
    return (str(spec), *described)
