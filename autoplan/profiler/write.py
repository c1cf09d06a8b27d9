"""Numbers -> the text of a cluster file with its profile (see ``cost_models/hardware.py`` for the format). No torch."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from autoplan.profiler.fit import CollectivePoints

_TABLES = ("memory", "compute", "collectives", "links.node", "links.network", "links.host")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that one profile says."""

    base: str
    """The shipped profile that has the rest of the numbers."""
    nodes: int
    per_node: int
    date: str
    how: str
    """In words: with what, on how many ranks."""
    numbers: Mapping[str, float]
    """By key of the profile, in the units of the file."""
    names: Mapping[str, str]
    """Texts by key: names of links."""
    machine: Mapping[str, str]
    collectives: tuple[CollectivePoints, ...]
    ops: Mapping[str, float]
    left_out: tuple[str, ...]
    """Cases that did not fit or could not be run."""


def cluster_text(found: Found) -> str:
    """The file. What was not measured is that of the profile ``base``."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Found) -> Iterator[str]:
    yield f"# Measured by autoplan profile, {found.date}: {found.how}."
    yield f"# What is not here was not measured, and is that of the profile {found.base}."
    for key in found.left_out:
        yield f"# left out, too large or not to be run alone: {key}"
    yield f"nodes = {found.nodes}"
    yield f"devices_per_node = {found.per_node}"
    yield f"profile = {_quoted(found.base)}"
    yield from ("", "[sources.profile]", 'kind = "measured"')
    yield f"text = {_quoted(f'autoplan profile: {found.how}')}"
    yield f"date = {found.date}"
    for table in _TABLES:
        yield from _table(table, found)
    yield from ("", "[measured]", f"date = {found.date}", "", "[measured.machine]")
    yield from (f"{key} = {_quoted(text)}" for key, text in sorted(found.machine.items()))
    for points in found.collectives:
        yield from _collective(points)
    if found.ops:
        yield from ("", "[measured.ops]  # microseconds")
        yield from (f"{_quoted(text)} = {_number(us)}" for text, us in sorted(found.ops.items()))


def _table(table: str, found: Found) -> Iterator[str]:
    texts = _inside(table, found.names)
    values = _inside(table, found.numbers)
    if not values:
        return
    yield from ("", f"[{table}]")
    yield from (f"{name} = {_quoted(text)}" for name, text in texts.items())
    for name, value in values.items():
        yield f'{name} = {{ value = {_number(value)}, source = "profile" }}'


def _inside(table: str, flat: Mapping[str, _Value]) -> dict[str, _Value]:
    found = ((key.rpartition("."), value) for key, value in sorted(flat.items()))
    return {name: value for (prefix, _, name), value in found if prefix == table}


def _collective(points: CollectivePoints) -> Iterator[str]:
    yield from ("", "[[measured.collectives]]", f"kind = {_quoted(points.kind.value)}")
    yield f"ranks = {points.ranks}"
    yield f"per_node = {points.per_node}"
    yield f"num_bytes = [{', '.join(map(str, points.num_bytes))}]"
    yield f"us = [{_joined(points.us)}]  # inside compute"
    yield f"alone_us = [{_joined(points.alone_us)}]"


def _joined(values: Iterable[float]) -> str:
    return ", ".join(map(_number, values))


def _number(value: float) -> str:
    """Four digits are more than a measurement has; TOML wants a digit before and after the point."""
    return repr(float(f"{value:.4g}"))


def _quoted(text: str) -> str:
    """A basic string of TOML: what JSON escapes, TOML reads."""
    return json.dumps(text, ensure_ascii=False)
