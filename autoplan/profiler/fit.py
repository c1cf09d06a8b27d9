"""Measured times -> the numbers of a profile: peaks, efficiency by size, latency. No torch.

A curve of a profile says t = launch + (size + half) / (peak * best), a straight line in the size; it is fitted to
relative errors, so that small sizes count as much as large ones.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoplan.cost_models.measured import smooth
from autoplan.profiler.cases import Attention, Case, Dispatch, HostCopy, Matmul, OpCase, Overlap, Stream, Transfer
from autoplan.sharding import CollectiveKind

Points = Sequence[tuple[float, float]]
"""Sizes with their microseconds."""
Known = Mapping[str, float | None]
"""Times by key of the case; None where there is none."""

_SHORT = {"float32": "fp32", "float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}
_LEAST_HALF = 1e-3
_MOST_LOSS = 0.99
"""A profile wants it below 1, and above 0."""
_Kind = TypeVar("_Kind", Matmul, Attention, Stream, Dispatch, HostCopy, OpCase, Transfer, Overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """t = start + slope * size, both positive."""

    start_us: float
    us_per_unit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoints:
    """One kind of collective by one size of group: bytes with times inside compute, and alone."""

    kind: CollectiveKind
    ranks: int
    per_node: int
    num_bytes: tuple[int, ...]
    us: tuple[float, ...]
    alone_us: tuple[float, ...]


def fit_line(points: Points) -> Line:
    """Least squares of relative errors; a slope or a start below zero becomes that of the best line through 0."""
    assert points, "no points to fit"
    weights = [1 / (us * us) for _, us in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    lean = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = lean / spread if spread > 0 else 0.0
    start = mean_y - slope * mean_x
    if slope > 0 and start >= 0:
        return Line(start_us=start, us_per_unit=slope)
    through = statistics.median(us / size for size, us in points)
    return Line(start_us=0.0, us_per_unit=through)


def numbers(cases: Sequence[Case], known: Known) -> dict[str, float]:
    """Numbers by key of the profile, in the units of the file; those that nothing was measured for are left out."""
    found: dict[str, float] = {}
    launch = next((us for case, us in timed(cases, known, Dispatch)), None)
    if launch is not None:
        found["compute.launch_us"] = launch
    for part in (_matmul, _attention, _memory, _host):
        found |= part(cases, known, launch or 0.0)
    return found | _links(cases, known) | _overlap(cases, known)


def timed(cases: Sequence[Case], known: Known, kind: type[_Kind]) -> Iterator[tuple[_Kind, float]]:
    """The cases of one kind that have a time, with it."""
    for case in cases:
        us = known.get(case.key)
        if isinstance(case, kind) and us is not None:
            yield case, us


def _curve(name: str, unit: str, points: Points, peak: float, launch: float) -> dict[str, float]:
    """Efficiency and half size; ``peak`` in units per microsecond, and ``unit`` says in what the file counts."""
    line = fit_line([(size, max(us - launch, us * 0.05)) for size, us in points])
    best = min(1.0, 1 / (line.us_per_unit * peak))
    half = max(line.start_us * peak * best / 1e6, _LEAST_HALF)
    return {f"compute.{name}_efficiency": best, f"compute.{name}_half_{unit}": half}


def _matmul(cases: Sequence[Case], known: Known, launch: float) -> dict[str, float]:
    """The peak of a dtype is its fastest product; the curve is that of the dtype with most shapes."""
    by_dtype: dict[str, list[tuple[float, float]]] = {}
    for case, us in timed(cases, known, Matmul):
        by_dtype.setdefault(case.dtype, []).append((float(case.flops), us))
    found = {
        f"compute.peak_{_SHORT[dtype]}_tflops": max(flops / us for flops, us in points) / 1e6
        for dtype, points in by_dtype.items()
    }
    if by_dtype:
        main = max(by_dtype, key=lambda dtype: len(by_dtype[dtype]))
        found |= _curve("matmul", "mflop", by_dtype[main], max(f / us for f, us in by_dtype[main]), launch)
    return found


def _attention(cases: Sequence[Case], known: Known, launch: float) -> dict[str, float]:
    found = list(timed(cases, known, Attention))
    if not found:
        return {}
    dtype = found[0][0].dtype
    rates = [case.flops / us for case, us in timed(cases, known, Matmul) if case.dtype == dtype]
    points = [(float(case.flops), us) for case, us in found]
    peak = max([*rates, *(flops / us for flops, us in points)])
    return _curve("attention", "mflop", points, peak, launch)


def _memory(cases: Sequence[Case], known: Known, launch: float) -> dict[str, float]:
    """The bandwidth is that of the fastest op, and the curve that of all of them."""
    points = [(float(case.num_bytes), us) for case, us in timed(cases, known, Stream)]
    if not points:
        return {}
    peak = max(size / us for size, us in points)
    rate = [case.num_elements / us for case, us in timed(cases, known, Stream)]
    return {
        "compute.bandwidth_gb_per_s": peak / 1e3,
        "compute.peak_vector_tflops": max(rate) * 8 / 1e6,
        **_curve("memory", "mb", points, peak, launch),
    }


def _host(cases: Sequence[Case], known: Known, _launch: float) -> dict[str, float]:
    points = [(float(case.num_bytes), us) for case, us in timed(cases, known, HostCopy)]
    if len(points) < 2:
        return {}
    line = fit_line(points)
    return {
        "links.host.bandwidth_gb_per_s": 1 / line.us_per_unit / 1e3,
        "links.host.latency_us": max(line.start_us, 0.1),
        "links.host.efficiency": 1.0,
    }


def _overlap(cases: Sequence[Case], known: Known) -> dict[str, float]:
    """What compute and a collective beside each other take beyond the longer one, by the time of the shorter one."""
    times: dict[str, dict[str, float]] = {}
    for case, us in timed(cases, known, Overlap):
        times.setdefault(case.pair, {})[case.part] = us
    whole = [each for each in times.values() if len(each) == 3]
    if not whole:
        return {}
    beyond = sum(each["both"] - max(each["transfer"], each["compute"]) for each in whole)
    loss = beyond / sum(min(each["transfer"], each["compute"]) for each in whole)
    return {"collectives.overlap_loss": min(max(loss, 1 - _MOST_LOSS), _MOST_LOSS)}


def _links(cases: Sequence[Case], known: Known) -> dict[str, float]:
    """What the formulas need for groups that were not measured: hop and bandwidth by a message, speed by all-reduce."""
    found: dict[str, float] = {}
    for points in collective_points(cases, known):
        level = "links.node" if points.per_node > 1 else "links.network"
        line = fit_line(list(zip(map(float, points.num_bytes), points.us, strict=True)))
        if points.kind is CollectiveKind.SEND:
            found[f"{level}.bandwidth_gb_per_s"] = 1 / line.us_per_unit / 1e3
            found[f"{level}.latency_us"] = max(line.start_us / 2, 0.1)
            found["collectives.launch_us"] = max(line.start_us / 2, 0.1)
    for points in collective_points(cases, known):
        level = "links.node" if points.per_node > 1 else "links.network"
        wire = found.get(f"{level}.bandwidth_gb_per_s")
        if points.kind is CollectiveKind.ALL_REDUCE and wire is not None:
            line = fit_line(list(zip(map(float, points.num_bytes), points.us, strict=True)))
            speed = 2 * (points.ranks - 1) / points.ranks / line.us_per_unit / 1e3
            found.setdefault(f"{level}.efficiency", min(1.0, speed / wire))
    return found


def collective_points(cases: Sequence[Case], known: Known) -> Iterator[CollectivePoints]:
    """Every kind and group that was measured, made smooth; a size counts when it was measured inside compute."""
    inside: dict[tuple[CollectiveKind, int, int], dict[int, float]] = {}
    alone: dict[tuple[CollectiveKind, int, int], dict[int, float]] = {}
    for case, us in timed(cases, known, Transfer):
        table = inside if case.inside else alone
        table.setdefault((case.kind, case.ranks, case.per_node), {})[case.num_bytes] = us
    for (kind, ranks, per_node), times in inside.items():
        lone = alone.get((kind, ranks, per_node), {})
        both = {size: max(us, lone.get(size, 0.0)) for size, us in times.items()}
        num_bytes, us_each = smooth(both)
        yield CollectivePoints(
            kind=kind, ranks=ranks, per_node=per_node, num_bytes=num_bytes, us=us_each,
            alone_us=tuple(lone.get(size, us) for size, us in zip(num_bytes, us_each, strict=True)),
        )  # fmt: skip
