"""Loading whole tensors into a compiled model."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoplan.errors import InputError
from autoplan.runtime.data import StageModule
from autoplan.runtime.skeleton import aliases, persistent_buffers


class LoadReport(NamedTuple):
    """Keys that were missing or unexpected, as ``nn.Module.load_state_dict`` reports them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_state(stage: StageModule, skeleton: nn.Module, state: Mapping[str, Tensor], *, strict: bool) -> LoadReport:
    """Copy ``state`` (whole tensors or DTensors) into parameters and persistent buffers of this rank.

    The names of all stages are known, so a whole checkpoint loads on every rank. Raises InputError with the missing
    and unexpected keys (``strict``), or with a shape that differs; nothing is written then.
    """
    other_names = aliases(skeleton)
    buffers = persistent_buffers(skeleton)
    source = {
        name: next((k for k in (name, *other_names.get(name, ())) if k in state), None) for name in _all(skeleton)
    }
    known = {*source, *(alias for names in other_names.values() for alias in names), *buffers}
    report = LoadReport(
        [name for name in stage.names if source[name] is None] + [name for name in buffers if name not in state],
        [key for key in state if key not in known],
    )
    if strict and (report.missing_keys or report.unexpected_keys):
        raise InputError(
            f"the state does not match the model: missing {report.missing_keys}, unexpected {report.unexpected_keys}; "
            "pass strict=False to load what matches"
        )
    wholes = {name: _whole(state[key]) for name in stage.names if (key := source[name]) is not None}
    _check_shapes(skeleton, wholes)
    with torch.no_grad():
        for name, whole in wholes.items():
            stage.fill(name, whole)
        for name, buffer in buffers.items():
            if name in state:
                buffer.copy_(_whole(state[name]))
    return report


def _all(skeleton: nn.Module) -> list[str]:
    return [name for name, _ in skeleton.named_parameters()]


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _check_shapes(skeleton: nn.Module, wholes: Mapping[str, Tensor]) -> None:
    for name, whole in wholes.items():
        expected = tuple(skeleton.get_parameter(name).shape)
        if tuple(whole.shape) != expected:
            raise InputError(f"{name} has shape {list(expected)} in the model, {list(whole.shape)} in the state")
