"""Private torch names that tracing needs, each with its reason. Tried with torch 2.13.0.

torch has no public way to make tensors without storage that keep their device (``meta`` does not: the device
is baked into the exported graph), nor to ask an op for its schema. Nothing else in ``autoplan.trace`` may
import a private name.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as _module
from torch.overrides import _get_current_function_mode_stack

INLINED_WRAPPERS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Higher-order ops that torch.export puts around a region; the region's graph is an attribute of the module."""


def fake_mode() -> AbstractContextManager[object]:
    """Make a mode in which tensors have shape, dtype and device but no storage (``FakeTensorMode``)."""
    return FakeTensorMode()


def is_fake(tensor: Tensor) -> bool:
    """Tell whether a tensor has no values (``FakeTensor``)."""
    return isinstance(tensor, FakeTensor)


def op_name(target: object) -> str | None:
    """Full name of an op (``aten.linear.default``), None for anything that is not an op (``OpOverload``)."""
    return str(target) if isinstance(target, OpOverload) else None


def wrapper_name(target: object) -> str | None:
    """Name of a higher-order op (``HigherOrderOperator``), None for anything else."""
    return str(target) if isinstance(target, HigherOrderOperator) else None


def mutates(target: object) -> bool:
    """Tell whether an op writes to one of its arguments (``OpOverload._schema``)."""
    return isinstance(target, OpOverload) and target._schema.is_mutable


def written_arguments(target: object) -> tuple[int, ...]:
    """Positions of the arguments that an op writes to (``OpOverload._schema``)."""
    arguments = target._schema.arguments if isinstance(target, OpOverload) else ()
    return tuple(i for i, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write)


def memory_of(value: object) -> int | None:
    """Identify the memory that a (fake) tensor lies in, None for anything else (``StorageWeakRef``)."""
    if not isinstance(value, Tensor):
        return None
    memory: int = StorageWeakRef(value.untyped_storage()).cdata  # type: ignore[no-untyped-call]
    return memory


def has_global_hooks() -> bool:
    """Tell whether hooks for all modules are registered (``torch.nn.modules.module``)."""
    return any(
        found for name, found in vars(_module).items() if name.startswith("_global_") and name.endswith("_hooks")
    )


def find_op(name: str) -> OpOverload:
    """The op of a full name (``OpOverload``)."""
    target: object = torch.ops
    for part in name.split("."):
        target = getattr(target, part)
    assert isinstance(target, OpOverload), f"{name} is no full name of an op"
    return target


def is_random(name: str) -> bool:
    """Tell whether the op of this name draws random numbers (``OpOverload.tags``)."""
    target: object = torch.ops
    for part in name.split("."):
        target = getattr(target, part)
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def below_autograd() -> AbstractContextManager[None]:
    """Pass on a call to what is below autograd; an op with an autograd kernel of its own needs it there."""
    return torch._C._AutoDispatchBelowAutograd()


def without_function_modes() -> AbstractContextManager[None]:
    """Read attributes of tensors without a detour through the modes of a trace (``DisableTorchFunction``)."""
    return torch._C.DisableTorchFunction()


def function_modes() -> tuple[int, ...]:
    """Identify the modes that lie over torch's functions now (``_get_current_function_mode_stack``)."""
    return tuple(id(type(mode)) for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]


def node_of(tensor: Tensor) -> fx.Node | None:
    """Find the node that makes a tensor in the trace that is running (``get_proxy_mode``, ``get_proxy_slot``)."""
    mode = get_proxy_mode()
    found = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if found is None else found.proxy.node
