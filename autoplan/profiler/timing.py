"""How long something takes: on the host by a clock, on an accelerator by its events. One small function each.

Never tried on an accelerator.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Run = Callable[[], object]
Elapsed = Callable[[Run, int], float]
"""Microseconds of one of so many runs in a row."""
Agree = Callable[[int], int]
"""A number that all ranks take, from what each would."""

_SAMPLE_US = 500.0
_WARM_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time one measurement may take."""

    seconds: float = 0.03
    least: int = 5
    """Samples at least."""


def host_us(run: Run, count: int) -> float:
    """Time by the host's clock."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) * 1e6 / count


def device_us(run: Run, count: int) -> float:
    """Time by events on the stream of a CUDA device: what the device does, launches included where they are late."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


def elapsed_on(device: torch.device) -> Elapsed:
    """The clock of a device."""
    return device_us if device.type == "cuda" else host_us


def typical_us(run: Run, elapsed: Elapsed, effort: Effort, agree: Agree = lambda wanted: wanted) -> float:
    """Lower quartile over samples of the time of one run: what else the machine does only ever adds time.

    Short runs are timed many in a row. ``agree`` makes ranks that wait for each other run equally often.
    """
    run()
    once = max(elapsed(run, _WARM_UP), 0.1)
    in_a_row = agree(max(1, round(_SAMPLE_US / once)))
    samples = agree(max(effort.least, min(200, round(effort.seconds * 1e6 / (once * in_a_row)))))
    return sorted(elapsed(run, in_a_row) for _ in range(samples))[samples // 4]
