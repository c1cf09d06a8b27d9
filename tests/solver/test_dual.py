"""Bounds, constructed cuts and the MILP of a chain against brute force over every cut and every option."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import oracle
import pytest
from random_chains import random_chain

from autoplan.plan.schedule import Hidden
from autoplan.solver import dual, exact, wholeranks
from autoplan.solver.chain import (
    ChainProblem,
    Counts,
    OptionCost,
    StageLimits,
    fastest_bound_us,
    objective_us,
    overflow_bytes,
)
from autoplan.solver.construct import construct
from autoplan.solver.dual import lower_bound_us
from autoplan.solver.exact import try_all
from autoplan.solver.milp import SolveState
from autoplan.solver.stages import _least, solve_stages
from autoplan.solver.wholeranks import slowest_rank

SEEDS = range(250)
EVER = float("inf")


@cache
def optimum(seed: int) -> float:
    """Infinite when nothing fits."""
    best = oracle.best_chain(random_chain(seed))
    return EVER if best is None else best


def too_high(bound: Callable[[ChainProblem], float]) -> list[int]:
    """Chains whose optimum is below a bound."""
    return [seed for seed in SEEDS if bound(random_chain(seed)) > optimum(seed) * (1 + 1e-9)]


def test_the_random_chains_cover_every_schedule_and_both_ends():
    chains = [random_chain(seed) for seed in SEEDS]
    assert {len(chain.stages) // len(chain.ranks) for chain in chains} == {1, 2, 3}
    assert {len(chain.bubble_rows) for chain in chains} == {1, 3, 8}
    assert any(chain.shared for chain in chains)
    nothing_fits = sum(optimum(seed) == EVER for seed in SEEDS)
    assert len(SEEDS) / 20 < nothing_fits < len(SEEDS) / 2


def test_no_bound_is_above_the_optimum():
    assert not too_high(lower_bound_us)
    assert not too_high(lambda chain: lower_bound_us(chain, whole=False))
    assert not too_high(fastest_bound_us)


def test_bounds_are_close_and_whole_segments_make_them_closer():
    feasible = [seed for seed in SEEDS if optimum(seed) < EVER]
    shares = [
        sum(bound(random_chain(seed)) / optimum(seed) for seed in feasible) / len(feasible)
        for bound in (fastest_bound_us, lambda chain: lower_bound_us(chain, whole=False), lower_bound_us)
    ]
    assert shares == sorted(shares)
    assert shares[-1] > 0.8


MUTATIONS = {
    "one per cent more": lambda chain: lower_bound_us(chain) * 1.01,
    "less memory": lambda chain: lower_bound_us(replace(chain, memory_bytes=chain.memory_bytes * 99 // 100)),
    "nothing hidden": lambda chain: lower_bound_us(replace(chain, bubble_rows=(Hidden(0, 0, 0),))),
    "sends hide as backward": lambda chain: lower_bound_us(
        replace(chain, stages=tuple(replace(stage, forward_us=0.0) for stage in chain.stages))
    ),
    "one microbatch more": lambda chain: lower_bound_us(replace(chain, num_microbatches=chain.num_microbatches + 1)),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_a_wrong_bound_would_show(mutation: Callable[[ChainProblem], float]):
    assert too_high(mutation)


def test_multipliers_without_their_memory_would_show(monkeypatch: pytest.MonkeyPatch):
    ranks_of = dual._ranks_of
    monkeypatch.setattr(dual, "_ranks_of", lambda *args: replace(ranks_of(*args), memory=ranks_of(*args).memory * 0.99))
    assert too_high(lower_bound_us)


def two_a_rank() -> ChainProblem:
    """Four segments on two ranks: two that keep everything do not fit, one that does and one that does not fits."""
    keep = OptionCost(time_us=10.0, end_us=0.0, state_bytes=0, activation_bytes=60, transient_bytes=0)
    again = OptionCost(time_us=16.0, end_us=0.0, state_bytes=0, activation_bytes=10, transient_bytes=0)
    return ChainProblem(
        lengths=(4,),
        options=((keep, again),),
        stages=(StageLimits(), StageLimits()),
        ranks=((0,), (1,)),
        in_flight=(((1,),), ((1,),)),
        num_microbatches=8,
        memory_bytes=110,
    )


def test_few_segments_are_counted_by_their_options(monkeypatch: pytest.MonkeyPatch):
    chain = two_a_rank()
    best = oracle.best_chain(chain)
    assert best == 8 * 26 + 26
    assert 0.95 * best < lower_bound_us(chain) <= best
    monkeypatch.setattr(dual, "_FEW", 0)
    assert lower_bound_us(chain) < 0.85 * best


def test_few_segments_without_one_of_their_options_would_show(monkeypatch: pytest.MonkeyPatch):
    multisets = dual.multisets
    monkeypatch.setattr(dual, "multisets", lambda options, number: multisets(options, number)[options > 1 :])
    assert too_high(lower_bound_us)


def with_slowest_rank(chain: ChainProblem) -> float:
    return lower_bound_us(chain, slowest_us=slowest_rank(chain, _least)[0])


def test_the_slowest_rank_by_whole_segments_is_a_bound_and_a_closer_one():
    seeds = [seed for seed in SEEDS[:80] if optimum(seed) < EVER and random_chain(seed).cuts is None]
    found = {seed: with_slowest_rank(random_chain(seed)) for seed in seeds}
    assert all(bound <= optimum(seed) * (1 + 1e-9) for seed, bound in found.items())
    assert sum(bound > lower_bound_us(random_chain(seed)) * 1.001 for seed, bound in found.items()) >= 3


def test_a_slowest_rank_that_is_one_segment_late_would_show(monkeypatch: pytest.MonkeyPatch):
    alone = wholeranks._alone

    def later(chain: ChainProblem, main: int, rank: int, counts: range) -> object:
        return alone(chain, main, rank, range(counts.start + 1, counts.stop + 1))

    monkeypatch.setattr(wholeranks, "_alone", later)
    seeds = [seed for seed in SEEDS[:80] if optimum(seed) < EVER and random_chain(seed).cuts is None]
    assert any(with_slowest_rank(random_chain(seed)) > optimum(seed) * (1 + 1e-9) for seed in seeds)


def too_good() -> list[int]:
    """Chains for which the counts of single ranks, put together, fit the memory and beat the optimum."""
    found = []
    for seed in SEEDS:
        chain = random_chain(seed)
        counts = slowest_rank(chain, _least)[1] if chain.cuts is None else None
        if counts is not None and overflow_bytes(chain, counts) <= 0:
            found.append((seed, objective_us(chain, counts)))
    assert len(found) > 20
    return [seed for seed, step in found if step < optimum(seed) * (1 - 1e-9)]


def test_ranks_put_together_are_never_better_than_the_best(monkeypatch: pytest.MonkeyPatch):
    assert not too_good()
    monkeypatch.setattr(wholeranks, "_is_cut", lambda *_: True)
    assert too_good(), "stages of any length, in any order, would not show"


def tried() -> dict[int, tuple[float, Counts]]:
    """Chains with few enough arrangements and choices."""
    found = {seed: try_all(random_chain(seed)) for seed in SEEDS}
    return {seed: one for seed, one in found.items() if one is not None}


def test_trying_all_options_bounds_the_step_and_finds_counts_close_to_it():
    found = tried()
    uneven = [seed for seed in found if len(set(random_chain(seed).sizes)) > 1]
    assert len(found) > 40
    assert len(uneven) > 10
    close = 0
    for seed, (bound, counts) in found.items():
        assert bound <= optimum(seed) * (1 + 1e-9), seed
        if counts:
            chain = random_chain(seed)
            assert overflow_bytes(chain, counts) <= 0, seed
            assert objective_us(chain, counts) >= optimum(seed) * (1 - 1e-9), seed
            close += objective_us(chain, counts) <= optimum(seed) * 1.001
    assert close > len(found) / 3


def test_trying_all_options_but_one_would_show(monkeypatch: pytest.MonkeyPatch):
    multisets = exact.multisets
    monkeypatch.setattr(exact, "multisets", lambda options, number: multisets(options, number)[options > 1 :])
    assert any(bound > optimum(seed) * (1 + 1e-9) for seed, (bound, _) in tried().items())


def test_a_bound_that_is_enough_is_a_bound_and_is_enough():
    for seed in SEEDS:
        chain, best = random_chain(seed), lower_bound_us(random_chain(seed))
        if best < EVER:
            assert best * 0.9 <= lower_bound_us(chain, enough_us=best * 0.9) <= best * (1 + 1e-9)
            assert lower_bound_us(chain, enough_us=best * 1.1) == best


def test_constructed_cuts_fit_and_are_never_better_than_the_best():
    found = 0
    for seed in SEEDS:
        chain = random_chain(seed)
        counts = construct(chain)
        if counts is not None:
            found += 1
            assert overflow_bytes(chain, counts) <= 0, seed
            assert objective_us(chain, counts) >= optimum(seed) * (1 - 1e-9), seed
    assert found > len(SEEDS) / 3


def test_solved_stages_equal_brute_force():
    for seed in SEEDS:
        chain = random_chain(seed)
        solution = solve_stages(chain)
        if optimum(seed) == EVER:
            assert (solution.state, solution.counts) == (SolveState.INFEASIBLE, None), seed
            assert solution.bound_us == EVER, seed
            continue
        assert solution.state is SolveState.OPTIMAL, seed
        assert overflow_bytes(chain, solution.counts) <= 0, seed
        assert objective_us(chain, solution.counts) == pytest.approx(optimum(seed), rel=1e-6), seed
        assert solution.bound_us <= optimum(seed) * (1 + 1e-9), seed


def test_a_cutoff_or_a_gap_never_loses_more_than_was_allowed():
    for seed in SEEDS[::4]:
        chain, best = random_chain(seed), optimum(seed)
        if best == EVER:
            continue
        beaten = solve_stages(chain, cutoff_us=best * 0.99)
        assert beaten.counts is None or objective_us(chain, beaten.counts) >= best * (1 - 1e-9), seed
        assert beaten.bound_us <= best * (1 + 1e-9), seed
        rough = solve_stages(chain, gap=0.05)
        assert objective_us(chain, rough.counts) <= best / (1 - 0.05) * (1 + 1e-9), seed
        assert rough.bound_us <= best * (1 + 1e-9), seed
