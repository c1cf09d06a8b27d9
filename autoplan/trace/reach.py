"""What code reaches outside its own arguments: global names, closures, attributes of classes."""

import functools
import sys
import types
from dataclasses import dataclass, field

CACHED = type(functools.lru_cache(len))
"""Type of a function that remembers its results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Places that code reads; their contents may change, the places do not."""

    names: tuple[tuple[dict[str, object], str], ...]
    """Globals of a module, and the name looked up there."""
    cells: tuple[types.CellType, ...]
    classes: tuple[type, ...]


@dataclass(slots=True, kw_only=True)
class _Found:
    names: dict[tuple[int, str], tuple[dict[str, object], str]] = field(default_factory=dict)
    cells: dict[int, types.CellType] = field(default_factory=dict)
    classes: dict[type, None] = field(default_factory=dict)
    functions: dict[int, types.FunctionType] = field(default_factory=dict)


def is_library(module: str | None) -> bool:
    """Whether a module belongs to Python, torch or numpy, whose state no model is expected to keep count in."""
    top = (module or "").partition(".")[0]
    return top in ("torch", "numpy", "autoplan") or top in sys.stdlib_module_names


def outside(classes: tuple[type, ...], held: tuple[object, ...]) -> Outside:
    """Follow the methods of classes, and other things that can be called, through every function that they name."""
    found = _Found()
    for value in held:
        _enter(found, value)
        _enter(found, vars(type(value)).get("__call__"))
    for kind in classes:
        found.classes[kind] = None
        for value in vars(kind).values():
            _enter(found, value)
    waiting = list(found.functions.values())
    while waiting:
        known = len(found.functions)
        for function in waiting:
            _read(found, function)
        waiting = list(found.functions.values())[known:]
    return Outside(names=tuple(found.names.values()), cells=tuple(found.cells.values()), classes=tuple(found.classes))


def _enter(found: _Found, value: object) -> None:
    """Note a function or a class that code can reach."""
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            _enter(found, part)
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        _enter(found, value.__func__)
    elif isinstance(value, types.FunctionType) and not is_library(value.__module__):
        found.functions.setdefault(id(value), value)
    elif isinstance(value, type) and not is_library(value.__module__):
        found.classes.setdefault(value)
    elif isinstance(value, functools.partial):
        _enter(found, value.func)
    elif isinstance(value, CACHED):
        _enter(found, value.__wrapped__)


def _read(found: _Found, function: types.FunctionType) -> None:
    """Note what one function names, and enter the functions among it."""
    names = sorted(_names(function.__code__))
    scopes = [function.__globals__]
    for scope in scopes:
        for name in names:
            if name in scope:
                found.names.setdefault((id(scope), name), (scope, name))
                _enter(found, scope[name])
        # Names of the user's other modules: helpers.scale(x).
        if scope is scopes[0]:
            modules = [scope[name] for name in names if isinstance(scope.get(name), types.ModuleType)]
            scopes += [vars(module) for module in modules if not is_library(module.__name__)]
    for cell in function.__closure__ or ():
        found.cells.setdefault(id(cell), cell)
        try:
            _enter(found, cell.cell_contents)
        except ValueError:  # the cell is still empty
            continue
    _enter(found, vars(function).get("__wrapped__"))


def _names(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*(_names(part) for part in inner))
