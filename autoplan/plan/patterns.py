"""Names of parameters folded over layers, and back.

In a pattern the part ``*`` stands for one number: ``h.*.attn.weight`` is ``h.0.attn.weight``, ``h.1.attn.weight``, ...
Foldings, all without loss:

    placements    {"h.*.attn.weight": "Shard(0)"} when all members agree, the single names otherwise
    names         {"layers": [0, 15], "names": ["h.*.ln.weight", "h.*.attn.weight"]} for layers that list the same names
    segments      the same for a run of segments, one a layer
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

_Value = TypeVar("_Value")


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdigit() and str(int(part)) == part


def pattern_of(name: str) -> str:
    """The name with every number replaced by ``*``."""
    return ".".join("*" if _is_index(part) else part for part in name.split("."))


def matches(pattern: str, name: str) -> bool:
    """Whether the name is a member of the pattern."""
    left, right = pattern.split("."), name.split(".")
    pairs = zip(left, right, strict=False)
    return len(left) == len(right) and all(a == b or (a == "*" and _is_index(b)) for a, b in pairs)


def by_pattern(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Pattern to its members, both in order of appearance."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(pattern_of(name), []).append(name)
    return {pattern: tuple(group) for pattern, group in groups.items()}


def fold_values(values: dict[str, _Value]) -> dict[str, _Value]:
    """Values by name to values by pattern; a pattern whose members differ stays as single names."""
    folded: dict[str, _Value] = {}
    for pattern, names in by_pattern(tuple(values)).items():
        alike = len({values[name] for name in names}) == 1
        if len(names) > 1 and alike and pattern not in values:
            folded[pattern] = values[names[0]]
        else:
            folded |= {name: values[name] for name in names}
    return folded


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The same names in layers ``first`` to ``last``: ``*`` is the number of the layer."""

    first: int
    last: int
    names: tuple[str, ...]

    def expand(self) -> Iterator[tuple[str, ...]]:
        """The names of each layer."""
        for index in range(self.first, self.last + 1):
            yield tuple(_replace(name, index) for name in self.names)


def _replace(template: str, index: int) -> str:
    return ".".join(str(index) if part == "*" else part for part in template.split("."))


def fold_names(names: tuple[str, ...]) -> tuple[str | Layers, ...]:
    """Fold runs of layers in a list of names; ``expand_names`` gives the same list back."""
    folded: list[str | Layers] = []
    position = 0
    while position < len(names):
        layers = _layers_at(names, position)
        folded.append(layers or names[position])
        position += len(layers.names) * (layers.last - layers.first + 1) if layers else 1
    return tuple(folded)


def expand_names(folded: tuple[str | Layers, ...]) -> tuple[str, ...]:
    """The full list of names."""
    names: list[str] = []
    for item in folded:
        if isinstance(item, Layers):
            names.extend(name for layer in item.expand() for name in layer)
        else:
            names.append(item)
    return tuple(names)


def fold_segments(segments: tuple[tuple[str, ...], ...]) -> Layers | None:
    """The longest run of name lists, from the first on, that differ only in the number of the layer; None below two."""
    index = next((int(part) for name in segments[0] for part in name.split(".") if _is_index(part)), None)
    if index is None or any("*" in name.split(".") for name in segments[0]):
        return None
    templates = tuple(_with_star(name, str(index)) for name in segments[0])
    count = 1
    while segments[count : count + 1] == (tuple(_replace(template, index + count) for template in templates),):
        count += 1
    return Layers(first=index, last=index + count - 1, names=templates) if count > 1 else None


def _with_star(name: str, index: str) -> str:
    """The name with its outermost number replaced, if that number is ``index``."""
    parts = name.split(".")
    depth = next((i for i, part in enumerate(parts) if _is_index(part)), None)
    if depth is None or parts[depth] != index:
        return name
    return ".".join([*parts[:depth], "*", *parts[depth + 1 :]])


def _layers_at(names: tuple[str, ...], position: int) -> Layers | None:
    """The run of at least two layers that starts here, by the outermost number of the name; None without one."""
    parts = names[position].split(".")
    depth = next((i for i, part in enumerate(parts) if _is_index(part)), None)
    if depth is None:
        return None
    first = int(parts[depth])
    templates = _templates(names, position, parts[: depth + 1])
    size, last = len(templates), first
    while templates and names[position + size * (last + 1 - first) :][:size] == tuple(
        _replace(template, last + 1) for template in templates
    ):
        last += 1
    return Layers(first=first, last=last, names=templates) if last > first else None


def _templates(names: tuple[str, ...], position: int, prefix: list[str]) -> tuple[str, ...]:
    """Names from here on under one layer, its number replaced; none when a name has a ``*`` of its own."""
    found: list[str] = []
    for name in names[position:]:
        parts = name.split(".")
        if parts[: len(prefix)] != prefix:
            break
        if "*" in parts:
            return ()
        found.append(".".join([*prefix[:-1], "*", *parts[len(prefix) :]]))
    return tuple(found)
