"""The user's module, copied without its weights.

In: any module, real, meta or fake. Out: a copy whose parameters and buffers are fake tensors on the CPU. The
user's module is never written to: its tensors are replaced while copying, so no byte of them is copied either.
"""

import copy
import dataclasses
from collections import OrderedDict

import torch
from torch import Tensor, nn

from autoplan.errors import TraceError
from autoplan.trace.compat import is_fake

_DICTS = (dict, OrderedDict)
TARGET_DEVICE = "cpu"
"""Every trace is made as if for this device, so that a graph does not depend on the machine that traced it."""


def fake_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor of the same shape and strides on the target device; call it inside a fake mode."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with torch.no_grad():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=TARGET_DEVICE)


def weightless_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy a module with fake parameters and buffers; ``dtype`` casts the floating ones as ``model.to`` would.

    Call it inside a fake mode. Tensors that are plain attributes stay real, as the graph needs their values.
    """
    memo: dict[int, object] = {id(t): t for t in _plain_tensors(model) if not is_fake(t) and not t.is_meta}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(fake_like(parameter, dtype), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = fake_like(buffer, dtype)
    for tensor in _plain_tensors(model):
        memo.setdefault(id(tensor), fake_like(tensor))
    # A module has a dozen empty dicts, for hooks; copying them one by one takes longer than all the rest.
    for module in model.modules():
        memo |= {id(value): type(value)() for value in vars(module).values() if type(value) in _DICTS and not value}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} cannot be copied for tracing: {type(error).__name__}: {error}\n"
            "Tracing works on a copy (without weights) so that your model stays as it is. "
            "Make the attribute that cannot be copied a local variable, or give its class a __deepcopy__."
        ) from error


def disable_cache(model: nn.Module) -> bool:
    """Switch off ``config.use_cache`` wherever it is on in this (copied) module; tell whether it was."""
    found = False
    for module in model.modules():
        for config in _configs(getattr(module, "config", None)):
            if getattr(config, "use_cache", False) is True:
                vars(config)["use_cache"] = False
                found = True
    return found


def _configs(config: object) -> list[object]:
    """A Hugging Face config and the configs inside it (a text model inside a vision one)."""
    if config is None or dataclasses.is_dataclass(config) and getattr(config, "__slots__", None):
        return []
    below = [part for name, part in getattr(config, "__dict__", {}).items() if name.endswith("_config")]
    return [config, *(part for part in below if getattr(part, "__dict__", None))]


def _plain_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that are attributes of a module without being registered."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
