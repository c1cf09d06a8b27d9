"""A hardware profile: TOML in, one frozen ``Profile`` out, every number checked, sourced and converted once.

The file, shortened (``profiles/H100.toml`` is a whole one)::

    name = "H100"
    description = "NVIDIA H100 SXM5 80 GB, 8 in a node"
    aliases = ["H100-80GB"]

    [sources.datasheet]                  # kind: datasheet, measured or assumed; date: of the number, or when read
    kind = "datasheet"
    text = "NVIDIA H100 Tensor Core GPU datasheet"
    date = 2024-09-01

    [memory]                             # of one device; `host = true` instead of capacity_mib: the node's own memory
    capacity_mib = { value = 81559, source = "smi" }
    [compute]
    peak_bf16_tflops = { value = 989, source = "datasheet" }
    [links.node]                         # and [links.network], between nodes, per device
    name = "NVLink4 with NVSwitch"
    bandwidth_gb_per_s = { value = 450, source = "datasheet" }
    [links.host]                         # optional: to the memory of the node, for offload; all of its keys or none
    name = "PCIe 5.0 x16"

Units of the file are in its keys: GB is 1e9 bytes, GiB 2**30, MiB 2**20, tflops 1e12 operations a second. Bandwidths
are per device and direction. In a ``Profile`` times are microseconds and sizes bytes.
"""

import datetime
import difflib
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, final, get_args

from autoplan.cost_models.measured import Measured
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
class Curve:
    """Speed that grows with size: ``best * size / (size + half_size)`` of the peak; half of ``best`` at ``half_size``.

    Equal to working at ``best`` on ``half_size`` more, so time stays monotone in size.
    """

    best: float
    """Fraction of the peak that a very large piece of work reaches, at most 1."""
    half_size: float
    """Operations or bytes, as the peak counts."""

    def time_us(self, amount: float, pieces: int, peak_per_us: float) -> float:
        """Time of ``amount`` of work in ``pieces`` equal pieces; 0 for no work."""
        return (amount + pieces * self.half_size) / (peak_per_us * self.best) if amount else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One level of the interconnect, as one device sees it."""

    name: str
    bandwidth_bytes_per_us: float
    """Per device and direction, on the wire."""
    latency_us: float
    """One hop of one message."""
    efficiency: float
    """Fraction of the bandwidth that large messages reach."""
    switch_reduce_efficiency: float | None
    """The same fraction for sums made inside the switch (NVLink SHARP); None where the switch cannot add."""

    @property
    def bytes_per_us(self) -> float:
        """Speed of large messages."""
        return self.bandwidth_bytes_per_us * self.efficiency

    @property
    def switch_reduce_bytes_per_us(self) -> float | None:
        """Speed of large sums in the switch, None where it cannot add."""
        if self.switch_reduce_efficiency is None:
            return None
        return self.bandwidth_bytes_per_us * self.switch_reduce_efficiency


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One kind of device and its links. Times in us, sizes in bytes; the numbers are those of the TOML file."""

    name: str
    description: str
    capacity_bytes: int | None
    """Memory of a device; None when devices share the memory of their node."""
    reserve_bytes: int
    """Never available to a plan: driver, context, communication buffers."""
    reserve_fraction: float
    """Of what is left, lost to the allocator's rounding and fragmentation."""
    peak_flops_per_us: tuple[tuple[str, float], ...]
    """By dtype, dense, of matrix work."""
    vector_flops_per_us: float
    """Of work outside the matrix units, any dtype."""
    memory_bytes_per_us: float
    launch_us: float
    """Start of one kernel on the device."""
    host_us: float
    """What the host takes to issue one op: no op is faster, however small; 0 where it is not known."""
    matmul: Curve
    attention: Curve
    memory: Curve
    collective_launch_us: float
    """Start of one collective, before its first message."""
    collective_host_us: float
    """What the host takes to issue one collective, as ``host_us``."""
    collective_slowdown: float
    """How much longer a collective takes inside a step than alone, at least 1."""
    overlap_loss: float
    """Part of a collective's time that compute beside it loses: both want the device's engines and its memory."""
    node: Link
    """Between devices of a node."""
    network: Link
    """Between nodes."""
    host: Link | None
    """To the memory of the node; None where the profile names no such link, or a device has no memory of its own."""
    sources: tuple[tuple[str, Source], ...]
    """Key in the file to source, for every number."""
    measured: Measured = Measured()

    @property
    def digest(self) -> str:
        """Fingerprint of the name and the numbers, sources left out; equal profiles price equally."""
        numbers = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name not in ("description", "sources")]
        return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]

    def usable_bytes(self, capacity_bytes: int) -> int:
        """What a plan may use of a device's memory; InputError when the reserve leaves nothing."""
        usable = int((capacity_bytes - self.reserve_bytes) * (1 - self.reserve_fraction))
        if usable < 1:
            raise InputError(
                f"a {self.name} device with {capacity_bytes / 2**30:.2f} GiB has nothing left after a reserve of "
                f"{self.reserve_bytes / 2**30:.2f} GiB; use fewer devices per node or a smaller memory.reserve_gib"
            )
        return usable


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
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


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


def build_profile(content: Content) -> Profile:
    """Convert units and put the numbers in their places; InputError on a missing key."""
    _check_complete(content)
    texts, values = content.texts, {key: number.value for key, number in content.numbers.items()}
    return Profile(
        name=texts["name"],
        description=texts["description"],
        capacity_bytes=None if content.host_memory else int(values["memory.capacity_mib"] * 2**20),
        reserve_bytes=int(values["memory.reserve_gib"] * 2**30),
        reserve_fraction=values["memory.reserve_fraction"],
        peak_flops_per_us=_peaks(values),
        vector_flops_per_us=values["compute.peak_vector_tflops"] * 1e6,
        memory_bytes_per_us=values["compute.bandwidth_gb_per_s"] * 1e3,
        launch_us=values["compute.launch_us"],
        host_us=values.get("compute.host_us", 0.0),
        matmul=_curve(values, "matmul", "half_mflop"),
        attention=_curve(values, "attention", "half_mflop"),
        memory=_curve(values, "memory", "half_mb"),
        collective_launch_us=values["collectives.launch_us"],
        collective_host_us=values.get("collectives.host_us", 0.0),
        collective_slowdown=values.get("collectives.slowdown", 1.0),
        overlap_loss=values.get("collectives.overlap_loss", 0.0),
        node=_link(content, "links.node"),
        network=_link(content, "links.network"),
        host=_link(content, "links.host") if _has_host(content) and not content.host_memory else None,
        sources=tuple((key, number.source) for key, number in sorted(content.numbers.items())),
    )


def _peaks(values: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Peaks by dtype, those the file has."""
    keys = {dtype: f"compute.peak_{short}_tflops" for short, dtype in _DTYPES.items()}
    return tuple((dtype, values[key] * 1e6) for dtype, key in keys.items() if key in values)


def _curve(values: Mapping[str, float], kind: str, half: str) -> Curve:
    return Curve(best=values[f"compute.{kind}_efficiency"], half_size=values[f"compute.{kind}_{half}"] * 1e6)


def _link(content: Content, key: str) -> Link:
    values = {name: number.value for name, number in content.numbers.items()}
    return Link(
        name=content.texts[f"{key}.name"],
        bandwidth_bytes_per_us=values[f"{key}.bandwidth_gb_per_s"] * 1e3,
        latency_us=values[f"{key}.latency_us"],
        efficiency=values[f"{key}.efficiency"],
        switch_reduce_efficiency=values.get(f"{key}.switch_reduce_efficiency"),
    )


def _has_host(content: Content) -> bool:
    """Whether the file says anything of a link to the node's memory."""
    return any(key in content.texts or key in content.numbers for key in _HOST_KEYS)


def _check_complete(content: Content) -> None:
    """Raise InputError naming the first key that is missing, or the two that exclude each other."""
    found = {**content.texts, **content.numbers}
    for key in (*_REQUIRED_TEXT_KEYS, *_REQUIRED, *(_HOST_KEYS if _has_host(content) else ())):
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
