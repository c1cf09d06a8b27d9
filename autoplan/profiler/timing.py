"""How long something takes: on the host by a clock, on an accelerator by its events. One small function each.

Never tried on an accelerator.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]
Elapsed = Callable[[Run, int], float]
"""Microseconds of one of so many runs in a row."""

_SAMPLE_US = 300.0
"""Shorter runs are timed many in a row."""
_MOST_SAMPLES = 100
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


def thread_us(run: Run, count: int) -> float:
    """Time that this thread was on a processor: of an op that one thread runs, whoever else wants the processor."""
    start = time.thread_time()
    for _ in range(count):
        run()
    return (time.thread_time() - start) * 1e6 / count


def device_us(run: Run, count: int) -> float:
    """Time by events on the stream of a CUDA device: what the device does, launches included where they are late."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


def clocks(device: torch.device) -> tuple[Elapsed, Elapsed]:
    """The clock of compute, and that of collectives."""
    if device.type == "cuda":
        return device_us, device_us
    return (thread_us if torch.get_num_threads() == 1 else host_us), host_us


def typical_us(run: Run, elapsed: Elapsed, effort: Effort) -> float:
    """Lower quartile over samples of the time of one run: what else the machine does only ever adds time."""
    run()
    once = max(elapsed(run, _WARM_UP), 0.1)
    in_a_row = max(1, round(_SAMPLE_US / once))
    return quartile([elapsed(run, in_a_row) for _ in range(num_samples(once * in_a_row, effort))])


def num_samples(sample_us: float, effort: Effort) -> int:
    """How often to measure what takes so long."""
    return max(effort.least, min(_MOST_SAMPLES, round(effort.seconds * 1e6 / sample_us)))


def quartile(samples: Sequence[float]) -> float:
    """The lower one."""
    return sorted(samples)[len(samples) // 4]
