"""What a profile or cluster file says: TOML in, every text and number checked and with its source out.

The format is that of ``profile.py``; this file knows its keys, which are needed, and what a value may be.
"""

import datetime
import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final, get_args

from autoplan.errors import InputError

SourceKind = Literal["datasheet", "measured", "assumed"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a number comes from."""

    kind: SourceKind
    text: str
    date: str
    """ISO date on which the number was published, measured or read."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A checked number of a file, in the unit of its key."""

    value: float
    source: Source


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a profile or cluster file says: texts, flags and numbers by dotted key."""

    file: str
    texts: Mapping[str, str]
    numbers: Mapping[str, Number]
    host_memory: bool | None
    """``memory.host``, None when not given."""


_HOST_KEYS = tuple(f"links.host.{key}" for key in ("name", "bandwidth_gb_per_s", "latency_us", "efficiency"))
"""All of them or none."""
_REQUIRED_TEXT_KEYS = ("name", "description", "links.node.name", "links.network.name")
_TEXT_KEYS = (*_REQUIRED_TEXT_KEYS, "links.host.name")
_OPTIONAL = (
    "memory.capacity_mib",
    "compute.peak_bf16_tflops",
    "compute.peak_fp16_tflops",
    "compute.peak_fp32_tflops",
    "compute.peak_fp64_tflops",
    "compute.host_us",
    "collectives.host_us",
    "collectives.slowdown",
    "collectives.overlap_loss",
    "links.node.switch_reduce_efficiency",
    "links.network.switch_reduce_efficiency",
)
_REQUIRED = (
    "memory.reserve_gib",
    "memory.reserve_fraction",
    "compute.peak_vector_tflops",
    "compute.bandwidth_gb_per_s",
    "compute.launch_us",
    "compute.matmul_efficiency",
    "compute.matmul_half_mflop",
    "compute.attention_efficiency",
    "compute.attention_half_mflop",
    "compute.memory_efficiency",
    "compute.memory_half_mb",
    "collectives.launch_us",
    "links.node.bandwidth_gb_per_s",
    "links.node.latency_us",
    "links.node.efficiency",
    "links.network.bandwidth_gb_per_s",
    "links.network.latency_us",
    "links.network.efficiency",
)
_KEYS = (*_REQUIRED_TEXT_KEYS, *_OPTIONAL, *_REQUIRED, *_HOST_KEYS, "memory.host")
_TABLES = ("memory", "compute", "collectives", "links", "links.node", "links.network", "links.host")


def load_toml(text: str, file: str) -> dict[str, object]:
    """Parse TOML; InputError naming the file and the line."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{file} is not valid TOML: {error}") from error


def read_content(document: Mapping[str, object], file: str, plain_source: Source | None = None) -> Content:
    """Check keys and numbers. A bare number is allowed only where ``plain_source`` says what it comes from."""
    sources = _read_sources(document.get("sources", {}), file)
    apart = ("sources",) if plain_source else ("sources", "aliases")  # a cluster file is found by its path alone
    flat = _flatten({key: value for key, value in document.items() if key not in apart}, "", file)
    texts: dict[str, str] = {}
    numbers: dict[str, Number] = {}
    host: bool | None = None
    for key, value in flat.items():
        if key in _TEXT_KEYS:
            texts[key] = _text(value, key, file)
        elif key == "memory.host":
            host = _flag(value, key, file)
        else:
            numbers[key] = _number(value, key, file, sources, plain_source)
    return Content(file=file, texts=texts, numbers=numbers, host_memory=host)


def overlay(base: Content, over: Content) -> Content:
    """``base`` with everything that ``over`` says put in its place; a capacity replaces ``memory.host``."""
    host = over.host_memory
    if host is None:
        host = None if "memory.capacity_mib" in over.numbers else base.host_memory
    numbers = {**base.numbers, **over.numbers}
    if host and "memory.capacity_mib" not in over.numbers:
        numbers.pop("memory.capacity_mib", None)
    return Content(file=over.file, texts={**base.texts, **over.texts}, numbers=numbers, host_memory=host)


def has_host(content: Content) -> bool:
    """Whether the file says anything of a link to the node's memory."""
    return any(key in content.texts or key in content.numbers for key in _HOST_KEYS)


def check_complete(content: Content) -> None:
    """Raise InputError naming the first key that is missing, or the two that exclude each other."""
    found = {**content.texts, **content.numbers}
    for key in (*_REQUIRED_TEXT_KEYS, *_REQUIRED, *(_HOST_KEYS if has_host(content) else ())):
        if key not in found:
            raise InputError(f"{content.file} has no {key}; add it{_example(key)}")
    if bool(content.host_memory) == ("memory.capacity_mib" in found):
        raise InputError(
            f"{content.file} must say how much memory a device has: either memory.capacity_mib, "
            "or memory.host = true when the devices of a node share its memory"
        )


def _read_sources(table: object, file: str) -> dict[str, Source]:
    """The ``[sources.NAME]`` tables."""
    if not isinstance(table, dict):
        raise InputError(f"{file}: sources must be tables [sources.NAME], found {table!r}")
    return {name: _source(entry, f"sources.{name}", file) for name, entry in table.items()}


def _source(entry: object, key: str, file: str) -> Source:
    if not isinstance(entry, dict) or set(entry) != {"kind", "text", "date"}:
        raise InputError(f"{file}: {key} needs exactly kind, text and date, found {entry!r}")
    kinds: tuple[SourceKind, ...] = get_args(SourceKind)
    kind = next((kind for kind in kinds if kind == entry["kind"]), None)
    if kind is None:
        raise InputError(f"{file}: {key}.kind is {entry['kind']!r}; use one of {', '.join(kinds)}")
    if not isinstance(entry["date"], datetime.date):
        raise InputError(f"{file}: {key}.date is {entry['date']!r}; write a date without quotes: date = 2026-01-31")
    return Source(kind=kind, text=_text(entry["text"], f"{key}.text", file), date=entry["date"].isoformat())


def _flatten(table: Mapping[str, object], prefix: str, file: str) -> dict[str, object]:
    """Nested tables to dotted keys; InputError on a key that means nothing."""
    flat: dict[str, object] = {}
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in _TABLES and isinstance(value, dict):
            flat |= _flatten(value, f"{key}.", file)
        elif key in _KEYS:
            flat[key] = value
        else:
            raise InputError(f"{file} has an unknown key {key}; {_fix_for_key(key)}")
    return flat


def _fix_for_key(key: str) -> str:
    """What to write in place of an unknown key."""
    nearest = difflib.get_close_matches(key, _KEYS, n=1)
    if nearest:
        return f"did you mean {nearest[0]}?"
    known = sorted(k for k in _KEYS if k.rpartition(".")[0] == key.rpartition(".")[0])
    return f"remove it or use one of {', '.join(known)}; tables are {', '.join(_TABLES)}"


def _text(value: object, key: str, file: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{file}: {key} must be a text, found {value!r}; write it in quotes")
    return value


def _flag(value: object, key: str, file: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{file}: {key} must be true or false, found {value!r}")
    return value


def _number(value: object, key: str, file: str, sources: Mapping[str, Source], plain: Source | None) -> Number:
    """A number with its source, positive and in range for its key."""
    if isinstance(value, dict) and set(value) == {"value", "source"}:
        if value["source"] not in sources:
            known = ", ".join(sources) or "none"
            raise InputError(f"{file}: {key} names the source {value['source']!r}; add [sources.{value['source']}] "
                             f"or use one of: {known}")  # fmt: skip
        return Number(value=_in_range(value["value"], key, file), source=sources[value["source"]])
    if plain is None:
        raise InputError(f"{file}: {key} is {value!r}; write it with its source{_example(key)}")
    return Number(value=_in_range(value, key, file), source=plain)


def _in_range(value: object, key: str, file: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise InputError(f"{file}: {key} must be a positive number, found {value!r}")
    if key.endswith("fraction") and value >= 1:
        raise InputError(f"{file}: {key} must be below 1, found {value!r}; 0.05 means 5 %")
    if key.endswith("efficiency") and value > 1:
        raise InputError(f"{file}: {key} is a fraction of the peak and at most 1, found {value!r}; 0.8 means 80 %")
    if key.endswith("loss") and value >= 1:
        raise InputError(f"{file}: {key} must be below 1, found {value!r}; 0.25 means a quarter")
    if key.endswith("slowdown") and value < 1:
        raise InputError(f"{file}: {key} is a factor of at least 1, found {value!r}; 1.3 means 30 % longer")
    return float(value)


def _example(key: str) -> str:
    """How the line would look."""
    name = key.rpartition(".")[2]
    return f': {name} = "..."' if key in _TEXT_KEYS else f': {name} = {{ value = 1.0, source = "NAME" }}'
