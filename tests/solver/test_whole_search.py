"""The whole search against brute force over every combination, on random small jobs.

The jobs have five models, clusters of one to eight devices, random speeds, memory, optimizer, precision and pins. The
least step is compared, and that nothing fits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
from every_plan import Found, best_of, every_point
from random_problems import Job, random_job

from autoplan.errors import InfeasibleError, InputError
from autoplan.solver import bounds, opening
from autoplan.solver.points import Space, all_points, families
from autoplan.solver.search import search
from autoplan.solver.solve import solve
from autoplan.solver.state import Node, Search, leaves
from autoplan.solver.tables import Tables

SEEDS = range(150)
"""Some pins cannot be; the others are more than a hundred jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    job: Job
    tables: Tables
    space: Space
    best: Found | None


@cache
def case(seed: int) -> Case | None:
    """A job with its best plan by brute force; None when its pins cannot be."""
    job = random_job(seed)
    try:
        tables, space = job.prepared()
    except InputError:
        return None
    found = list(every_point(tables, space))
    return Case(job=job, tables=tables, space=space, best=best_of(found, pins_tensor=job.request.pins_tensor))


def cases() -> list[Case]:
    return [found for seed in SEEDS if (found := case(seed)) is not None]


def searched(one: Case) -> Search:
    return search(one.tables, one.space, one.job.request, lambda _: None)


def step_us(one: Case) -> float:
    return float("inf") if one.best is None else one.best.step.total_us


@pytest.mark.parametrize("seed", SEEDS)
def test_the_search_equals_brute_force(seed: int) -> None:
    one = case(seed)
    if one is None:
        with pytest.raises(InputError):
            random_job(seed).prepared()
        return
    state = searched(one)
    assert state.status == "complete"
    if one.best is None:
        assert state.best is None
        return
    assert state.best is not None
    assert state.best.total_us == pytest.approx(step_us(one), rel=1e-6)
    assert state.bound_us <= step_us(one) * (1 + 1e-9)
    assert state.best.overflow_bytes <= 0


def test_the_jobs_are_a_hundred_and_of_every_sort() -> None:
    found = cases()
    assert len(found) >= 100
    assert {one.job.model for one in found} == {"even", "mixed", "tapered", "nanogpt", "llama", "mixtral"}
    nothing_fits = sum(one.best is None for one in found)
    assert len(found) / 10 < nothing_fits < len(found) / 2
    points = [one.best.point for one in found if one.best is not None]
    for axis in ("pp", "dp", "tp", "chunks", "shards"):
        assert any(getattr(point, axis) > 1 for point in points), axis
    assert {point.data for point in points} == {"replicate", "zero1", "zero2", "shard"}
    assert len({point.schedule for point in points}) > 2
    assert max(sum(1 for _ in all_points(one.space)) for one in found) > 50


def test_every_candidate_is_counted_once() -> None:
    for one in cases():
        state = searched(one)
        total = sum(leaves(state, Node(family=family)) for family in families(one.space))
        assert state.num_solved + state.num_bounded + state.refusals.total() == total


def test_where_nothing_fits_solve_says_so() -> None:
    one = next(one for one in cases() if one.best is None)
    with pytest.raises(InfeasibleError):
        solve(one.tables.sg, one.job.cluster, one.job.cost, one.job.request, "toy")


def _times(factor: float, bound: Callable[..., float]) -> Callable[..., float]:
    return lambda *args, **more: factor * bound(*args, **more)


@pytest.mark.parametrize(
    ("module", "name"),
    [(opening, "lower_bound_us"), (opening, "fastest_bound_us"), (opening, "family_memory_us"),
     (opening, "family_bound_us"), (bounds, "lower_bound_us")],
    ids=lambda part: part if isinstance(part, str) else part.__name__.rpartition(".")[2],
)  # fmt: skip
def test_a_bound_that_is_too_high_would_show(module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, name, _times(1.2, getattr(module, name)))
    for one in cases():
        state = searched(one)
        if state.best is not None and state.best.total_us > step_us(one) * (1 + 1e-6):
            return
    pytest.fail("every answer is the same with a wrong bound")
