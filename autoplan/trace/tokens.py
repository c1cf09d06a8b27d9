"""What the forward of a layer can see, as a value that compares: equal tokens, equal computation.

A token holds the layer's tree (classes, attributes, shapes and flags of its tensors), the arguments, and from outside
the layer every global name and closure that its code reaches, with the modes of torch. Tensors count by their shape
and identity within the call, never by name, so two layers of one kind have one token.
"""

import contextvars
import enum
import functools
import random
import sys
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autoplan.trace.compat import is_fake
from autoplan.trace.reach import CACHED, Outside, is_library, outside
from autoplan.trace.strip import Stripped
from autoplan.trace.varies import Varies

DEPTH = 6
"""How far attributes of attributes are followed; objects below count by identity."""
GLOBAL_DEPTH = 3
LONGEST = 10_000
"""Items of a container that is still compared."""
ORIGINAL = "autoplan_original"
"""Attribute of a forward that stands for another: the other."""

Attribute = tuple[str, str]
"""Module path below the layer, and the name of one of its attributes."""

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_TENSORS = ("_parameters", "_buffers")
_HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)
"""Where a module keeps its hooks."""
_WITHOUT_STATE = ("torch", "numpy", "autoplan", "logging")
"""Packages whose objects count by identity: no model is expected to keep count in them."""


class NoToken(Exception):
    """Something that cannot be compared; the message says what."""


@dataclass(slots=True, kw_only=True)
class Describer:
    """Turns values into tokens; ``own`` names the modules of the layer."""

    own: Mapping[int, str] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    """Objects on the way, so that cycles end."""

    def token(self, value: object, depth: int) -> Hashable:
        """Compare plain data by value, code by its text, objects by their attributes; NoToken for iterators."""
        kind = type(value)
        if kind in _PLAIN:
            return kind.__name__, repr(value)
        if kind is Varies:
            return "varies"
        if isinstance(value, nn.Module):
            if id(value) not in self.own:
                raise NoToken(f"an attribute holds the module {kind.__name__}, which is not part of the layer")
            return "module", self.own[id(value)]
        if isinstance(value, Tensor | type | types.ModuleType | enum.Enum):
            return kind.__name__, id(value)
        if isinstance(value, types.MethodType):  # made anew at each look, so it has no identity
            return "method", self.token(value.__func__, depth), self.token(value.__self__, depth)
        if id(value) in self.seen:
            return "again", self.seen[id(value)]
        if depth == 0:
            return "object", id(value)
        self.seen[id(value)] = len(self.seen)
        return self._object(value, depth - 1)

    def _object(self, value: object, depth: int) -> Hashable:
        kind = type(value)
        if isinstance(value, Mapping | Set | Sequence) and len(value) > LONGEST:
            raise NoToken(f"a {kind.__name__} with {len(value)} items is within reach of forward")
        match value:
            case types.FunctionType():
                cells = (cell.cell_contents for cell in value.__closure__ or () if not _empty(cell))
                parts = (value.__defaults__, value.__kwdefaults__, value.__dict__, *cells)
                return "function", id(value.__code__), *(self.token(part, depth) for part in parts)
            case functools.partial():
                return "partial", *(self.token(part, depth) for part in (value.func, value.args, value.keywords))
            case Mapping():
                items = tuple((self.token(key, depth), self.token(item, depth)) for key, item in value.items())
                return kind.__name__, id(kind), items
            case Set():
                return kind.__name__, tuple(sorted(repr(self.token(item, depth)) for item in value))
            case Sequence():
                return kind.__name__, id(kind), tuple(self.token(item, depth) for item in value)
            case contextvars.ContextVar():
                return "context", self.token(value.get(None), depth)
            case Iterator():
                raise NoToken(f"an iterator ({kind.__name__}) is within reach of forward; its state cannot be read")
        if isinstance(value, CACHED):
            return "cache", id(value), value.cache_info().currsize
        attributes = [] if kind.__module__.startswith(_WITHOUT_STATE) else _vars(value)
        if not attributes:
            return "object", id(value)
        return kind.__name__, id(kind), tuple((name, self.token(part, depth)) for name, part in attributes)


def layer_token(layer: nn.Module, varying: frozenset[Attribute]) -> Hashable:
    """Token of the tree: what ``forward`` may read of the layer itself. Attributes in ``varying`` count by type."""
    modules = list(layer.named_modules(remove_duplicate=False))
    describer = Describer(own={id(module): path for path, module in modules})
    return tuple((path, id(type(module)), _module(module, path, describer, varying)) for path, module in modules)


def _module(module: nn.Module, path: str, describer: Describer, varying: frozenset[Attribute]) -> Hashable:
    found: list[Hashable] = []
    for name, value in vars(module).items():
        if isinstance(value, Stripped):
            found.append((name, value.tokens))
        elif name in _TENSORS:
            found.append((name, tuple((key, tensor_token(tensor)) for key, tensor in value.items())))
        elif name == "_modules":
            found.append((name, tuple((key, child is None) for key, child in value.items())))
        elif name in _HOOKS:
            _refuse_hooks(path, value)
        elif (path, name) in varying:
            found.append((name, "varies"))
        else:
            original = getattr(value, ORIGINAL, value) if name == "forward" else value
            found.append((name, describer.token(original, DEPTH)))
    return tuple(found)


def _refuse_hooks(path: str, hooks: Mapping[int, object]) -> None:
    """Hooks of the layer itself run around its forward; those below would be left out with it."""
    if path and hooks:
        raise NoToken(f"{path} has hooks")


def tensor_token(tensor: object) -> Hashable:
    """Shape, layout and flags of a tensor."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor) or not all(type(size) is int for size in (*tensor.shape, *tensor.stride())):
        raise NoToken("a size depends on the data")
    place = tensor.storage_offset(), str(tensor.dtype), str(tensor.device)
    return tuple(tensor.shape), tuple(tensor.stride()), place, tensor.requires_grad


def arguments_token(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Hashable:
    """Token of a call's arguments: tensors, plain values and tuples of them."""
    tensors: dict[int, int] = {}
    return _argument(args, tensors), tuple((name, _argument(value, tensors)) for name, value in kwargs.items())


def _argument(value: object, tensors: dict[int, int]) -> Hashable:
    if type(value) is tuple:
        return "tuple", tuple(_argument(item, tensors) for item in value)
    if isinstance(value, Tensor) and is_fake(value) and not isinstance(value, nn.Parameter):
        return "tensor", tensors.setdefault(id(value), len(tensors)), id(type(value)), tensor_token(value)
    if type(value) in _PLAIN:
        return type(value).__name__, repr(value)
    if type(value) is Varies:
        return "varies"
    raise NoToken(f"an argument is a {type(value).__name__}")


def surroundings_token(reached: Outside) -> Hashable:
    """Token of what the code reaches outside the layer: globals, closures, class attributes, modes, random state."""
    describer = Describer()
    names = tuple(_global(describer, scope.get(name)) for scope, name in reached.names)
    cells = tuple(_global(describer, None if _empty(cell) else cell.cell_contents) for cell in reached.cells)
    classes = tuple(
        (name, _global(describer, value))
        for kind in reached.classes for name, value in vars(kind).items() if not callable(value)
    )  # fmt: skip
    modes = (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"),
        str(torch.get_autocast_dtype("cpu")), str(torch.get_default_dtype()), str(torch.get_default_device()),
    )  # fmt: skip
    return names, cells, classes, modes, hash(random.getstate()), _numpy_state()


def _numpy_state() -> str:
    """Where numpy's generator stands, if anything has loaded it."""
    numpy = sys.modules.get("numpy.random")
    return (
        ""
        if numpy is None
        else repr([part.tobytes() if hasattr(part, "tobytes") else part for part in numpy.get_state()])
    )


def _global(describer: Describer, value: object) -> Hashable:
    if isinstance(value, nn.Module):
        return "module", id(value)
    return describer.token(value, GLOBAL_DEPTH)


def layer_outside(layer: nn.Module) -> Outside:
    """What the code of the layer's classes and of the functions in its attributes reaches."""
    kinds = dict.fromkeys(kind for module in layer.modules() for kind in type(module).__mro__)
    held = [value for module in layer.modules() for value in vars(module).values() if callable(value)]
    return outside(tuple(kind for kind in kinds if not is_library(kind.__module__)), tuple(held))


def _vars(value: object) -> list[tuple[str, object]]:
    """Attributes of an object, those in slots included."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
    return [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name, None)) for name in slots)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (
        (slots,) if isinstance(slots, str) else tuple(name for name in slots if name not in ("__dict__", "__weakref__"))
    )


def _empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises when it is read)
    except ValueError:
        return True
    return False
