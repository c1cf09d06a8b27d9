"""Time of one device's work, from its operations, its bytes and how fast the device is at that size.

    max(launches * host_us, launches * launch_us + max(operations / (peak * share), bytes / (bandwidth * share)))

The roofline of Williams, Waterman and Patterson (2009), with peaks lowered by how well work of that size uses the
device. The pieces of one ``Work`` are its launches, and each has its own share of the inefficiency. A device that is
done waits for the host to issue the next op.
"""

from typing import assert_never

from autoplan.cost import Estimate, Work
from autoplan.cost_models.profile import Curve, Profile
from autoplan.errors import InputError
from autoplan.ir import DTYPE_BYTES


def compute_us(work: Work, profile: Profile) -> float:
    """Microseconds of ``work`` on one device; 0 when it neither computes nor moves a byte.

    Raises InputError for a dtype that the device has no peak for.
    """
    assert min(work.flops, work.num_bytes, work.launches) >= 0, f"work is never negative: {work}"
    peak, curve = _peak(work, profile)
    if not work.flops and not work.num_bytes:
        return 0.0
    arithmetic = curve.time_us(work.flops, work.launches, peak)
    traffic = profile.memory.time_us(work.num_bytes, work.launches, profile.memory_bytes_per_us)
    return max(work.launches * profile.host_us, work.launches * profile.launch_us + max(arithmetic, traffic))


def estimate(work: Work, profile: Profile) -> Estimate:
    """The time of ``compute_us`` opened; InputError as there."""
    time = compute_us(work, profile)
    peak, curve = _peak(work, profile)
    parts = {
        "memory_efficiency": profile.memory.time_us(work.num_bytes, work.launches, profile.memory_bytes_per_us),
        "launch_us": work.launches * profile.launch_us,
        "host_us": work.launches * profile.host_us if time == work.launches * profile.host_us else 0.0,
    }
    arithmetic = curve.time_us(work.flops, work.launches, peak)
    parts["peak_vector_tflops" if work.kind == "memory" else f"{work.kind}_efficiency"] = arithmetic
    key = max(parts, key=lambda name: parts[name])
    at_best = max(work.flops / peak, work.num_bytes / profile.memory_bytes_per_us)
    return Estimate(
        time_us=time,
        efficiency=at_best / time if time else 1.0,
        limit="launch" if key in ("launch_us", "host_us") else "memory" if key == "memory_efficiency" else "compute",
        source=_source_text(profile, f"compute.{key}"),
    )


def _source_text(profile: Profile, key: str) -> str:
    source = dict(profile.sources).get(key)
    return f"{key}, not in the profile" if source is None else f"{key}, {source.kind} {source.date}: {source.text}"


def _peak(work: Work, profile: Profile) -> tuple[float, Curve]:
    """Operations per us at best, and the curve of the work's kind."""
    match work.kind:
        case "matmul":
            return _matrix_peak(work.dtype, profile), profile.matmul
        case "attention":
            return _matrix_peak(work.dtype, profile), profile.attention
        case "memory":
            if work.dtype not in DTYPE_BYTES:
                raise InputError(f"dtype {work.dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")
            return profile.vector_flops_per_us, Curve(best=1.0, half_size=0.0)
        case unknown:
            assert_never(unknown)


def _matrix_peak(dtype: str, profile: Profile) -> float:
    peaks = dict(profile.peak_flops_per_us)
    if dtype not in peaks:
        raise InputError(
            f"the profile {profile.name} has no peak for {dtype} matrix work, only for {', '.join(peaks)}; "
            "use one of these dtypes, or a cluster file with that peak under [compute]"
        )
    return peaks[dtype]
