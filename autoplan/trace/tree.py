"""Nested inputs and outputs as flat leaves and a structure, and back.

Tuples, lists, named tuples, dicts, dataclasses and Hugging Face's ``ModelOutput`` are containers; everything
else is a leaf. A structure compares by value, so a call can be checked against the trace.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A place in the structure that holds a tensor, a number or None."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A container: its type, the names of its parts and the parts."""

    path: str
    type: type
    keys: tuple[object, ...]
    parts: tuple["Structure", ...]


Structure = Leaf | Node


def flatten(value: object, path: str = "") -> tuple[list[object], Structure]:
    """Split nested containers into leaves, left to right, and their structure; ``path`` names the whole."""
    items = _items(value, path)
    if items is None:
        return [value], Leaf(path=path)
    leaves: list[object] = []
    parts = []
    for _, part_path, part in items:
        below, structure = flatten(part, part_path)
        leaves += below
        parts.append(structure)
    kind = dict if isinstance(value, Mapping) and not _is_known_mapping(value) else type(value)
    return leaves, Node(path=path, type=kind, keys=tuple(key for key, _, _ in items), parts=tuple(parts))


def unflatten(structure: Structure, leaves: Iterable[object]) -> object:
    """Undo ``flatten``: put the leaves back in their containers."""
    return _rebuild(structure, iter(leaves))


def leaf_paths(structure: Structure) -> list[str]:
    """Paths of the leaves, left to right."""
    if isinstance(structure, Leaf):
        return [structure.path]
    return [path for part in structure.parts for path in leaf_paths(part)]


def difference(expected: Structure, found: Structure) -> str | None:
    """Say in words where two structures part first, None when they are equal."""
    place = expected.path or "the inputs"
    match expected, found:
        case Leaf(), Leaf():
            return None
        case Node(), Node() if expected.type is not found.type:
            return f"{place} was a {expected.type.__name__} and is now a {found.type.__name__}"
        case Node(), Node():
            return _keys_difference(expected, found)
        case Node(), Leaf():
            return f"{place} was a {expected.type.__name__} and is now a single value"
        case _:
            return f"{place} was a single value and is now a container"


def _keys_difference(expected: Node, found: Node) -> str | None:
    missing = [str(key) for key in expected.keys if key not in found.keys]
    surplus = [str(key) for key in found.keys if key not in expected.keys]
    if missing or surplus:
        words = [f"without {', '.join(missing)}"] if missing else []
        words += [f"with {', '.join(surplus)}"] if surplus else []
        return f"{expected.path or 'the call'} is now {' and '.join(words)}"
    by_key = dict(zip(found.keys, found.parts, strict=True))
    parts = zip(expected.keys, expected.parts, strict=True)
    return next((text for key, part in parts if (text := difference(part, by_key[key]))), None)


def _is_known_mapping(value: object) -> bool:
    return type(value) is dict or (isinstance(value, dict) and dataclasses.is_dataclass(value))


def _items(value: object, path: str) -> list[tuple[object, str, object]] | None:
    """Parts as (key, path, value), None for a leaf."""
    if isinstance(value, Mapping):
        return [(key, _join(path, str(key)), part) for key, part in value.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, _join(path, name), getattr(value, name)) for name in names]
    if isinstance(value, (tuple, list)):
        return [(i, f"{path}[{i}]", part) for i, part in enumerate(value)]
    return None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _rebuild(structure: Structure, leaves: Iterator[object]) -> object:
    if isinstance(structure, Leaf):
        return next(leaves)
    parts = [_rebuild(part, leaves) for part in structure.parts]
    kind = structure.type
    if issubclass(kind, dict):
        items = {str(key): part for key, part in zip(structure.keys, parts, strict=True)}
        return kind(**items) if kind is not dict else dict(zip(structure.keys, parts, strict=True))
    if dataclasses.is_dataclass(kind):
        made: object = object.__new__(kind)
        for key, part in zip(structure.keys, parts, strict=True):
            object.__setattr__(made, str(key), part)
        return made
    rebuilt: object = kind.__call__(*parts) if kind not in (tuple, list) else kind.__call__(parts)
    return rebuilt
