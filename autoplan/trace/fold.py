"""Layers that are equal are traced twice and repeated: a long trace in the time of a short one.

The model runs as it is, at its full depth, but ``forward`` of a layer in a ``ModuleList`` or ``Sequential`` is
replaced. The first two calls with one token (see ``tokens``: what a call can see) run the layer between marks in the
graph. Each later call becomes one op, which ``unfold`` replaces by the marked stretch of the first with the tensors of
this layer. So everything around the layers is traced as ever, and a layer that sees anything else than the two before
it is traced itself. A call that leaves something changed (an attribute, a global) is never repeated.
"""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, nn

from autoplan.trace.compat import function_modes, has_global_hooks, is_fake, without_function_modes
from autoplan.trace.reach import Outside
from autoplan.trace.strip import strip
from autoplan.trace.tokens import (
    ORIGINAL,
    Attribute,
    NoToken,
    arguments_token,
    layer_outside,
    layer_token,
    surroundings_token,
    tensor_token,
)
from autoplan.trace.tree import Structure, flatten, unflatten
from autoplan.trace.varies import Varies

MIN_LAYERS = 4
"""Equal layers that are worth it: two are traced."""
KEPT = 4
"""Equal layers that keep their parameters: more than two, for the first one or every second may see something else."""
MARK_IN, MARK_OUT, REPLAY = (f"autoplan.{name}.default" for name in ("mark_in", "mark_out", "replay"))

_ops = torch.library.Library("autoplan", "FRAGMENT")  # type: ignore[no-untyped-call]
_ops.define("mark_in(Tensor x, int region, int index) -> Tensor")  # type: ignore[no-untyped-call]
_ops.define("mark_out(Tensor x, int region, int index) -> Tensor")  # type: ignore[no-untyped-call]
_ops.define("replay(Tensor[] x, int call, int index, int[] shape, int[] stride, str dtype) -> Tensor")  # type: ignore[no-untyped-call]


def _like(x: Tensor, region: int, index: int) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _made(x: list[Tensor], call: int, index: int, shape: list[int], stride: list[int], dtype: str) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=x[0].device)


torch.library.register_fake("autoplan::mark_in", _like, lib=_ops)
torch.library.register_fake("autoplan::mark_out", _like, lib=_ops)
torch.library.register_fake("autoplan::replay", _made, lib=_ops)


class CannotFold(Exception):
    """The model has to be traced in full; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An output tensor that the layer makes."""

    index: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """What a call returns: per leaf the number of an argument, a tensor that it makes, or a plain value."""

    structure: Structure
    leaves: tuple[int | Made | tuple[object], ...]


@dataclass(slots=True, kw_only=True)
class Unit:
    """Calls that are equal. ``regions`` are those that were traced, at most two; none once it cannot be repeated."""

    regions: list[int] = field(default_factory=list)
    returned: Returned | None = None
    repeatable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A call that stands for the nodes of a region, with the tensors of another layer."""

    region: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer whose forward is replaced."""

    path: str
    module: nn.Module
    varying: frozenset[Attribute]
    outside: Outside
    stripped: bool


@dataclass(slots=True, kw_only=True)
class Fold:
    """What happened while the model ran."""

    units: dict[Hashable, Unit] = field(default_factory=dict)
    regions: list[str] = field(default_factory=list)
    """Path of the layer of each marked region."""
    replays: list[Replay] = field(default_factory=list)
    called: set[str] = field(default_factory=set)
    running: bool = False
    broken: str = ""
    """Why the model has to be traced in full, should the model have caught the error that said so."""
    missed: bool = False
    """Whether the parameters that were taken out are to blame."""

    @contextmanager
    def runs(self) -> Iterator[None]:
        """While the model runs, nothing may look for parameters that were taken out."""
        self.running = True
        try:
            yield
        finally:
            self.running = False

    def miss(self) -> None:
        """Fail for want of a parameter that was taken out."""
        if self.running:
            self.missed = True
            self.fail("the model looks at parameters of a layer that was to be repeated")

    def fail(self, reason: str) -> NoReturn:
        """Raise CannotFold, now and after the trace."""
        self.broken = reason
        raise CannotFold(reason)

    def refuse_stand_ins(self, leaves: Iterable[object]) -> None:
        """Fail if a number that differs from layer to layer is among what is returned."""
        if any(type(leaf) is Varies for leaf in leaves):
            self.fail("a layer returns a number that differs from layer to layer")

    @property
    def twins(self) -> tuple[tuple[int, int], ...]:
        """Pairs of regions that must be equal, because calls stand for the first."""
        return tuple((unit.regions[0], unit.regions[1]) for unit in self.units.values() if len(unit.regions) > 1)


def fold_layers(model: nn.Module, stripping: bool) -> Fold | None:
    """Replace forward of the layers that repeat in a (weightless) model of one's own; None where none do.

    ``stripping`` takes out the parameters of those that will hardly be traced.
    """
    fold = Fold()
    found = [] if has_global_hooks() else list(_repeated_layers(model, stripping))
    for layer in found:
        vars(layer.module)["forward"] = _wrapped(fold, layer, layer.module.forward)
    for layer in found:
        if layer.stripped:
            strip(layer.module, tensor_token, fold.miss)
    return fold if found else None


def _repeated_layers(model: nn.Module, stripping: bool) -> Iterator[Layer]:
    """Children of lists that have at least ``MIN_LAYERS`` of their class and share nothing with the rest."""
    uses = _uses(model)
    reached: dict[tuple[type, ...], Outside] = {}
    for path, container in model.named_modules():
        kinds: dict[type, list[tuple[str, nn.Module]]] = {}
        for name, child in container.named_children() if isinstance(container, nn.ModuleList | nn.Sequential) else ():
            if not _is_leaf(child) and all(uses[id(part)] == 1 for part in _parts(child)):
                kinds.setdefault(type(child), []).append((f"{path}.{name}" if path else name, child))
        for layers in kinds.values():
            if len(layers) < MIN_LAYERS:
                continue
            varying = _varying([child for _, child in layers])
            alike: Counter[Hashable] = Counter()
            for where, child in layers:
                classes = tuple(type(module) for module in child.modules())
                outside = reached[classes] = reached.get(classes) or layer_outside(child)
                token = _static_token(child, varying) if stripping else None
                alike[token] += 1
                stripped = token is not None and alike[token] > KEPT
                yield Layer(path=where, module=child, varying=varying, outside=outside, stripped=stripped)


def _static_token(layer: nn.Module, varying: frozenset[Attribute]) -> Hashable:
    try:
        with without_function_modes():
            return layer_token(layer, varying)
    except NoToken:
        return None


def _is_leaf(module: nn.Module) -> bool:
    """A layer of torch itself is one op, or a container of layers that are looked at by themselves."""
    return type(module).__module__.startswith("torch.nn") and not any(True for _ in module.children())


def _parts(module: nn.Module) -> Iterator[object]:
    for below in module.modules():
        yield below
        yield from (tensor for tensor in (*below._parameters.values(), *below._buffers.values()) if tensor is not None)


def _uses(model: nn.Module) -> dict[int, int]:
    """How often each module and tensor occurs in the tree."""
    uses: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=False):
        uses[id(module)] = uses.get(id(module), 0) + 1
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            uses[id(tensor)] = uses.get(id(tensor), 0) + 1
    return uses


def _varying(layers: list[nn.Module]) -> frozenset[Attribute]:
    """Integers that are different in every layer, as the number of the layer is."""
    values: dict[Attribute, list[int]] = {}
    for layer in layers:
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                if type(value) is int:
                    values.setdefault((path, name), []).append(value)
    return frozenset(key for key, found in values.items() if len(set(found)) == len(layers))


def _wrapped(fold: Fold, layer: Layer, original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def forward(*args: object, **kwargs: object) -> object:
        if layer.path in fold.called:
            fold.fail(f"{layer.path} is called twice")
        fold.called.add(layer.path)
        key = _key_or_none(layer, args, kwargs)
        unit = Unit(repeatable=False) if key is None else fold.units.setdefault(key, Unit())
        if len(unit.regions) == 2:
            return _replay(fold, unit, layer, _tensors(args, kwargs))
        if layer.stripped:
            fold.miss()
        if not unit.repeatable or not _tensors(args, kwargs):
            return original(*args, **kwargs)
        return _trace(fold, unit, key, layer, original, args, kwargs)

    setattr(forward, ORIGINAL, original)
    return forward


def _key_or_none(layer: Layer, args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable | None:
    try:
        return _key(layer, args, kwargs)
    except NoToken:
        return None


def _key(layer: Layer, args: tuple[object, ...], kwargs: dict[str, object]) -> Hashable:
    modes = function_modes()
    with without_function_modes():
        tree = layer_token(layer.module, layer.varying)
        return modes, tree, arguments_token(args, kwargs), surroundings_token(layer.outside)


def _tensors(args: tuple[object, ...], kwargs: dict[str, object]) -> list[Tensor]:
    """The tensors among the arguments, each once."""
    return list({id(leaf): leaf for leaf in flatten((*args, kwargs))[0] if isinstance(leaf, Tensor)}.values())


def _trace(
    fold: Fold, unit: Unit, key: Hashable, layer: Layer, original: Callable[..., object],
    args: tuple[object, ...], kwargs: dict[str, object],
) -> object:  # fmt: skip
    """Run the layer between marks. Its unit is repeatable if the call leaves everything as it was."""
    region = len(fold.regions)
    fold.regions.append(layer.path)
    given = _tensors(args, kwargs)
    marks = [_marked(fold, torch.ops.autoplan.mark_in, tensor, region, i) for i, tensor in enumerate(given)]
    inside = {id(tensor): mark for tensor, mark in zip(given, marks, strict=True)}
    leaves, structure = flatten((*args, kwargs))
    called = unflatten(structure, [inside.get(id(leaf), leaf) for leaf in leaves])
    assert isinstance(called, tuple)
    with _hidden(fold, layer):
        result = original(*called[:-1], **called[-1])
    leaves, structure = flatten(result)
    fold.refuse_stand_ins(leaves)
    returned = _returned(leaves, structure, marks)
    if returned is None or unit.returned not in (None, returned) or _key_or_none(layer, args, kwargs) != key:
        unit.repeatable, unit.regions = False, []
        return result
    unit.regions.append(region)
    unit.returned = returned
    return unflatten(structure, [
        _marked(fold, torch.ops.autoplan.mark_out, leaves[i], region, item.index) if isinstance(item, Made)
        else given[item] if isinstance(item, int) else item[0]
        for i, item in enumerate(returned.leaves)
    ])  # fmt: skip


def _marked(fold: Fold, op: Callable[..., Tensor], tensor: object, region: int, index: int) -> Tensor:
    assert isinstance(tensor, Tensor)
    mark = op(tensor, region, index)
    if mark.requires_grad != tensor.requires_grad:
        fold.fail("a tensor that needs a gradient passes a layer where none is recorded")
    return mark


@contextmanager
def _hidden(fold: Fold, layer: Layer) -> Iterator[None]:
    """Put ``Varies`` in the place of the numbers that differ from layer to layer."""
    places = [(layer.module.get_submodule(path), name) for path, name in sorted(layer.varying)]
    numbers = [vars(module)[name] for module, name in places]
    stand_ins = [Varies(name, number) for (_, name), number in zip(places, numbers, strict=True)]
    for (module, name), stand_in in zip(places, stand_ins, strict=True):
        vars(module)[name] = stand_in
    try:
        yield
        for (module, name), stand_in in zip(places, stand_ins, strict=True):
            if stand_in.used or vars(module).get(name) is not stand_in:
                fold.fail(f"forward of {layer.path} uses or sets {name}, which differs from layer to layer")
    except Exception as error:  # a model that catches it would go on in another way than it does without folding
        fold.fail(f"{layer.path}: {error}")
    finally:
        for (module, name), number in zip(places, numbers, strict=True):
            vars(module)[name] = number


def _returned(leaves: list[object], structure: Structure, marks: list[Tensor]) -> Returned | None:
    """What the call returned; None if it cannot be given again."""
    arguments = {id(mark): i for i, mark in enumerate(marks)}
    made: dict[int, Made] = {}
    found: list[int | Made | tuple[object]] = []
    for leaf in leaves:
        if id(leaf) in arguments:
            found.append(arguments[id(leaf)])
        elif isinstance(leaf, Tensor) and is_fake(leaf) and leaf.device == marks[0].device:
            if isinstance(leaf, nn.Parameter) or not all(type(size) is int for size in (*leaf.shape, *leaf.stride())):
                return None
            made.setdefault(id(leaf), Made(
                index=len(made),
                shape=tuple(leaf.shape),
                stride=tuple(leaf.stride()),
                dtype=str(leaf.dtype).removeprefix("torch."),
                requires_grad=leaf.requires_grad,
            ))  # fmt: skip
            found.append(made[id(leaf)])
        elif type(leaf) in (type(None), bool, int, float, str):
            found.append((leaf,))
        else:
            return None
    return Returned(structure=structure, leaves=tuple(found))


def _replay(fold: Fold, unit: Unit, layer: Layer, given: list[Tensor]) -> object:
    """Stand for the nodes of the unit with one op per tensor that the call makes."""
    assert unit.returned is not None
    call = len(fold.replays)
    fold.replays.append(Replay(region=unit.regions[0], path=layer.path))
    leaves: list[object] = []
    made: dict[int, Tensor] = {}
    for item in unit.returned.leaves:
        if isinstance(item, Made):
            if item.index not in made:
                made[item.index] = _remade(fold, given, call, item)
            leaves.append(made[item.index])
        else:
            leaves.append(given[item] if isinstance(item, int) else item[0])
    return unflatten(unit.returned.structure, leaves)


def _remade(fold: Fold, given: list[Tensor], call: int, item: Made) -> Tensor:
    made: Tensor = torch.ops.autoplan.replay(given, call, item.index, item.shape, item.stride, item.dtype)
    if made.requires_grad != item.requires_grad:
        fold.fail("a gradient starts or ends inside a layer that repeats")
    return made
