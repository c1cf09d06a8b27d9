"""Give values to the parameters of a model built on the meta device, the same under every plan."""

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from autoplan.errors import InputError
from autoplan.runtime.compat import copy_of_module, is_persistent
from autoplan.runtime.data import StageModule


def init_weights(stage: StageModule, skeleton: nn.Module, seed: int) -> None:
    """Run each module's own initialisation on the CPU, whole, one module at a time, and keep this rank's parts.

    A module initialises itself by ``reset_parameters()``, then by the model's ``_init_weights(module)`` where it has
    one (as nanoGPT and Hugging Face models do). The random numbers of a module depend on ``seed`` and its path only.
    Raises InputError naming a module that leaves a parameter unset. Buffers on meta are filled the same way.
    """
    canonical = {id(p): name for name, p in skeleton.named_parameters()}
    mine = set(stage.names)
    for path, module in skeleton.named_modules():
        own = {key: canonical[id(p)] for key, p in module.named_parameters(recurse=False)}
        meta_buffers = [key for key, b in module.named_buffers(recurse=False) if b.is_meta]
        if not meta_buffers and not mine & set(own.values()):
            continue
        filled = _initialised(skeleton, module, path, seed)
        for key, name in own.items():
            # A tied parameter is initialised by the first module that holds it.
            if name in mine and name == f"{path}.{key}".removeprefix("."):
                stage.fill(name, filled.get_parameter(key).detach())
        for key in meta_buffers:
            module.register_buffer(key, filled.get_buffer(key), persistent=is_persistent(module, key))


def _initialised(skeleton: nn.Module, module: nn.Module, path: str, seed: int) -> nn.Module:
    """A copy of one module (without its children) with real, initialised parameters and buffers."""
    module_copy = copy_of_module(module, _blank_param, _blank_buffer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little") >> 1)
        with torch.no_grad():
            for initialise in _initialisers(skeleton, module_copy):
                initialise()
    for key, value in [*module_copy.named_parameters(recurse=False), *module_copy.named_buffers(recurse=False)]:
        if value.is_floating_point() and value.isnan().any():
            raise InputError(
                f"module {path or 'the model'!r} ({type(module).__name__}) leaves {key!r} without a value: give it a "
                "reset_parameters() method that sets it, or load a state_dict instead of calling init_weights"
            )
    return module_copy


def _initialisers(skeleton: nn.Module, module: nn.Module) -> Iterator[Callable[[], object]]:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        yield reset
    general = getattr(skeleton, "_init_weights", None)
    if callable(general):
        yield lambda: general(module)


def _blank(like: Tensor) -> Tensor:
    """A real tensor of that shape in which every element can be told from a set one."""
    blank = torch.empty_like(like, device="cpu")
    return blank.fill_(float("nan")) if blank.is_floating_point() else blank.zero_()


def _blank_param(like: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_blank(like), requires_grad=like.requires_grad)


def _blank_buffer(like: Tensor) -> Tensor:
    return _blank(like) if like.is_meta else like
