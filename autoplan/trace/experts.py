"""Hugging Face's mixtures of experts, traced with ``autoplan::experts`` in place of their loops over experts.

transformers lets each config name how its experts are computed, from a registry. For the time of a trace our op is in
that registry and the weightless copy of the model names it; the user's model and the registry stay as they were.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor, nn

from autoplan.errors import TraceError
from autoplan.trace.experts_op import ACTIVATIONS

_NAME = "autoplan"
_FIELD = "_experts_implementation_internal"
_REGISTRY = "transformers.integrations.moe"
_ACTIVATION_OF = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "ReLU": "relu", "ReLUSquaredActivation": "relu2",
}  # fmt: skip
"""Class of an activation to its name in the op."""


@contextlib.contextmanager
def experts_as_one_op(copied: nn.Module) -> Iterator[None]:
    """Have the experts of this (copied) module computed by our op; the module is changed, the registry put back.

    Nothing happens to a model that transformers did not make.
    """
    found = sys.modules.get(_REGISTRY)
    if found is None:
        yield
        return
    for module in copied.modules():
        config = getattr(module, "config", None)
        if _FIELD in getattr(config, "__dict__", {}):
            vars(config)[_FIELD] = _NAME
    registry = found.ALL_EXPERTS_FUNCTIONS
    registry[_NAME] = _experts_forward
    try:
        yield
    finally:
        del registry[_NAME]


def _experts_forward(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls in place of the forward of a class of experts."""
    _refuse_unknown(module)
    first, down = (module.gate_up_proj if module.has_gate else module.up_proj), module.down_proj
    assert isinstance(first, Tensor) and isinstance(down, Tensor)
    if module.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    name = _ACTIVATION_OF[type(module.act_fn).__name__]
    result: Tensor = torch.ops.autoplan.experts(hidden, index, weights, first, down, name, first.shape[0])
    return result


def _refuse_unknown(module: nn.Module) -> None:
    """Raise TraceError for experts that compute something else than the op."""
    registry: ModuleType = sys.modules[_REGISTRY]
    activation = type(getattr(module, "act_fn", None)).__name__
    reasons = {
        "add a bias": module.has_bias,
        "interleave gate and up": module.has_gate and not module.is_concatenated,
        "gate in their own way": module.has_gate
        and getattr(type(module), "_apply_gate", None) is not registry._default_apply_gate,
        "normalise their results": module.has_post_expert_norm,
        f"use the activation {activation}": activation not in _ACTIVATION_OF,
    }
    unknown = [reason for reason, holds in reasons.items() if holds]
    if unknown:
        raise TraceError(
            f"the experts of {type(module).__name__} {' and '.join(unknown)}, which autoplan cannot plan. It knows "
            f"experts that compute down(act(gate) * up) or down(act(up)) with an activation of {', '.join(ACTIVATIONS)}"
        )
