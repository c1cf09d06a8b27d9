"""The loop over cases, on every rank alike: what is known is skipped, what is too large is noted, the rest is timed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from autoplan.profiler.cache import Cache
from autoplan.profiler.cases import Case, Compute, Overlap, Transfer
from autoplan.profiler.collectives import World, all_must_end, make_transfer, messages
from autoplan.profiler.ops import is_too_large, make_run
from autoplan.profiler.timing import Effort, Elapsed, num_samples, quartile, typical_us

Told = Callable[[str], None]
_LEAST_US = 0.1
"""Below what a clock can tell."""
_PILOTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """How times are taken."""

    compute: Elapsed
    transfer: Elapsed
    effort: Effort = Effort()


def measure(cases: Sequence[Case], world: World, cache: Cache | None, watch: Stopwatch, told: Told) -> None:
    """Time every case that the cache lacks. Only rank 0 has a cache; the others do what it says."""
    left = _left(cases, world, cache)
    for number, case in enumerate(left, 1):
        told(f"{number} of {len(left)}: {case.key}")
        us = measure_case(case, world, watch)
        if us is None:
            told(f"left out, it does not fit or cannot be run alone: {case.key}")
        if cache is not None:
            cache.add(case.key, us)


def _left(cases: Sequence[Case], world: World, cache: Cache | None) -> list[Case]:
    known = [set(cache.times) if cache is not None else set()]
    if world.size > 1:
        dist.broadcast_object_list(known, src=0)
    return [case for case in cases if case.key not in known[0]]


def measure_case(case: Case, world: World, watch: Stopwatch) -> float | None:
    """Microseconds of a case; None when it does not fit on one of the ranks, or cannot be run."""
    if isinstance(case, Transfer | Overlap):
        return _transfer_us(case, world, watch)
    world.wait()
    us = world.mean(_local_us(case, world, watch))
    return None if math.isinf(us) else max(us, _LEAST_US)


def _local_us(case: Compute, world: World, watch: Stopwatch) -> float:
    """Each rank by itself, all at the same time; infinite when there is no time."""
    try:
        run = make_run(case, world.device)
        return math.inf if run is None else typical_us(run, watch.compute, watch.effort)
    except Exception as error:
        if is_too_large(error) or isinstance(error, RuntimeError | IndexError | ValueError | TypeError):
            return math.inf
        raise


def _transfer_us(case: Transfer | Overlap, world: World, watch: Stopwatch) -> float | None:
    """All ranks together, equally often, each time from when the last of them has come."""
    try:
        run, compute = make_transfer(case, world)
        fits = 1
    except (MemoryError, RuntimeError) as error:
        if not is_too_large(error):
            raise
        fits = 0
    if world.most([1.0 - fits])[0]:
        return None
    world.wait()
    pilots = [watch.transfer(run, 1) for _ in range(_PILOTS)]
    count = int(world.most([float(num_samples(max(min(pilots), 1.0), watch.effort))])[0])
    times = []
    for _ in range(count):
        compute()
        times.append(watch.transfer(run, 1))
    together = world.most(times) if all_must_end(case) else world.least(times)
    return max(quartile(together) / messages(case), _LEAST_US)
