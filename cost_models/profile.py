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

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import final

from autoplan.cost_models.content import Content, Source, check_complete, has_host
from autoplan.cost_models.measured import Measured
from autoplan.errors import InputError


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


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def build_profile(content: Content) -> Profile:
    """Convert units and put the numbers in their places; InputError on a missing key."""
    check_complete(content)
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
        host=_link(content, "links.host") if has_host(content) and not content.host_memory else None,
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
