"""A call's arguments -> flat leaves, checked against the trace; and the batch dim of each input.

Arguments are brought into one normal form first (by parameter name, arguments equal to their default left out),
so ``model(x, y)``, ``model(x, targets=y)`` and ``model(x, targets=y, mask=None)`` are the same call.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from autoplan.errors import InputError
from autoplan.trace.tree import Structure, difference, flatten, leaf_paths

Inputs = Mapping[str, object] | Sequence[object]
"""What ``example_inputs`` returns: keyword arguments, or positional ones."""


Baked = tuple[tuple[object] | None, ...]
"""For every leaf: the leaf itself (in a tuple) where it is not a tensor, None where it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Structure of a call, and its leaves that are not tensors (they are part of the graph)."""

    signature: inspect.Signature
    structure: Structure
    baked: Baked


def as_call(inputs: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
    """Split example inputs into args and kwargs: a dict is keyword arguments, a tuple positional ones."""
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise InputError(
        f"inputs must be a dict (keyword arguments) or a tuple (positional ones), found {type(inputs).__name__}; "
        "write (x,) for a single input"
    )


def input_spec(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[object], InputSpec]:
    """Flatten a call of ``model``: all leaves, and the spec that later calls are checked against."""
    signature = inspect.signature(model.forward)
    leaves, structure = flatten(normal_form(signature, args, kwargs))
    return leaves, InputSpec(signature=signature, structure=structure, baked=baked_leaves(leaves))


def baked_leaves(leaves: Sequence[object]) -> Baked:
    """Keep the leaves that are not tensors."""
    return tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves)


def normal_form(
    signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Arguments by parameter name, without those that are their default."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"the inputs do not fit the model's forward{signature}: {error}") from error
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    positional = inspect.Parameter.VAR_POSITIONAL in kinds.values()  # *args needs what comes before it
    found: dict[str, object] = {}
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif positional or value is not signature.parameters[name].default:
            found[name] = value
    return found


def bind(signature: inspect.Signature, named: Mapping[str, object]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Undo ``normal_form``: args and kwargs to call forward with."""
    known = {name: named[name] for name in signature.parameters if name in named}
    extra = {name: value for name, value in named.items() if name not in known}
    bound = inspect.BoundArguments(signature, OrderedDict(known))
    return bound.args, {**bound.kwargs, **extra}


def checked_leaves(spec: InputSpec, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
    """Tensors of a call, in trace order. Raises InputError where the call differs from the traced one."""
    leaves, structure = flatten(normal_form(spec.signature, args, kwargs))
    problem = difference(spec.structure, structure)
    if problem is not None:
        raise InputError(f"this call does not match the traced one: {problem}. Trace again with inputs like these.")
    leaves = _in_order(spec.structure, structure, leaves)
    tensors = []
    for path, baked, leaf in zip(leaf_paths(spec.structure), spec.baked, leaves, strict=True):
        if baked is None and isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif baked is None or isinstance(leaf, Tensor) or type(leaf) is not type(baked[0]) or leaf != baked[0]:
            was = "a tensor" if baked is None else repr(baked[0])
            now = "a tensor" if isinstance(leaf, Tensor) else repr(leaf)
            raise InputError(f"input {path} was {was} when the model was traced and is now {now}. Trace again.")
    return tensors


def _in_order(expected: Structure, found: Structure, leaves: list[object]) -> list[object]:
    """Dict entries may come in another order than in the trace."""
    by_path = dict(zip(leaf_paths(found), leaves, strict=True))
    return [by_path[path] for path in leaf_paths(expected)]


def find_batch_dims(example_inputs: Callable[[int], Inputs], batch_size: int) -> tuple[int | None, ...]:
    """Batch dim of every tensor input: the dim that changes with the batch size. Order as ``example_inputs`` gives."""
    small, _ = flatten(_keyed(example_inputs(batch_size)))
    large, structure = flatten(_keyed(example_inputs(2 * batch_size)))
    if len(small) != len(large):
        raise InputError("example_inputs returns another structure for another batch size; it must not")
    found = []
    for path, one, two in zip(leaf_paths(structure), small, large, strict=True):
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            found.append(_changing_dim(path, tuple(one.shape), tuple(two.shape)))
    return tuple(found)


def _keyed(inputs: Inputs) -> object:
    args, kwargs = as_call(inputs)
    return (*args, kwargs)


def _changing_dim(path: str, small: tuple[int, ...], large: tuple[int, ...]) -> int | None:
    changed = [i for i, (a, b) in enumerate(zip(small, large, strict=False)) if a != b]
    if len(small) != len(large) or len(changed) > 1:
        raise InputError(f"input {path} grows from {small} to {large} with the batch size; one dim at most may grow")
    return changed[0] if changed else None


def guess_batch_dims(tensors: Sequence[Tensor]) -> tuple[int | None, ...]:
    """Batch dims from one example: dim 0 of every tensor that has the first tensor's dim 0."""
    sized = [tensor.shape[0] for tensor in tensors if tensor.dim() > 0]
    return tuple(0 if tensor.dim() > 0 and tensor.shape[0] == sized[0] else None for tensor in tensors)
