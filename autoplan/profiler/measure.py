"""The loop over cases, on every rank alike: what is known is skipped, what is too large is noted, the rest is timed."""

import math
from collections.abc import Callable, Sequence

import torch.distributed as dist

from autoplan.profiler.cache import Cache
from autoplan.profiler.cases import Case, Transfer
from autoplan.profiler.collectives import World, make_transfer, messages
from autoplan.profiler.ops import is_too_large, make_run
from autoplan.profiler.timing import Effort, Elapsed, typical_us

Told = Callable[[str], None]
_LEAST_US = 0.1
"""Below what a clock can tell."""


def measure(cases: Sequence[Case], world: World, cache: Cache | None, elapsed: Elapsed, effort: Effort,
            told: Told) -> None:  # fmt: skip
    """Time every case that the cache lacks. Only rank 0 has a cache; the others do what it says."""
    left = _left(cases, world, cache)
    for number, case in enumerate(left, 1):
        told(f"{number} of {len(left)}: {case.key}")
        us = measure_case(case, world, elapsed, effort)
        if us is None:
            told(f"left out, it does not fit or cannot be run alone: {case.key}")
        if cache is not None:
            cache.add(case.key, us)


def _left(cases: Sequence[Case], world: World, cache: Cache | None) -> list[Case]:
    known = [set(cache.times) if cache is not None else set()]
    if world.size > 1:
        dist.broadcast_object_list(known, src=0)
    return [case for case in cases if case.key not in known[0]]


def measure_case(case: Case, world: World, elapsed: Elapsed, effort: Effort) -> float | None:
    """Microseconds of a case on the slowest rank; None when it does not fit on one of them, or cannot be run."""
    if isinstance(case, Transfer):
        return _transfer_us(case, world, elapsed, effort)
    world.wait()
    us = world.slowest(_local_us(case, world, elapsed, effort))
    return None if math.isinf(us) else max(us, _LEAST_US)


def _local_us(case: Case, world: World, elapsed: Elapsed, effort: Effort) -> float:
    """Each rank by itself, all at the same time; infinite when there is no time."""
    assert not isinstance(case, Transfer), "a collective is no work of one rank"
    try:
        run = make_run(case, world.device)
        return math.inf if run is None else typical_us(run, elapsed, effort)
    except Exception as error:
        if is_too_large(error) or isinstance(error, RuntimeError | IndexError | ValueError | TypeError):
            return math.inf
        raise


def _transfer_us(case: Transfer, world: World, elapsed: Elapsed, effort: Effort) -> float | None:
    """All ranks together, equally often."""
    try:
        run, compute = make_transfer(case, world)
        fits = 1
    except (MemoryError, RuntimeError) as error:
        if not is_too_large(error):
            raise
        fits = 0
    if world.agree(1 - fits):
        return None
    world.wait()
    us = typical_us(run, elapsed, effort, world.agree)
    if compute is not None:
        world.wait()
        us -= typical_us(compute, elapsed, effort, world.agree)
    return max(world.slowest(us) / messages(case), _LEAST_US)
