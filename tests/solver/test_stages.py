"""The ends of a solve of stages that random chains do not meet; test_dual.py has the comparison with brute force."""

from dataclasses import replace

import pytest
from random_chains import MIB, random_chain

from autoplan.solver.chain import ChainProblem, OptionCost, StageLimits, overflow_bytes
from autoplan.solver.milp import SolveState
from autoplan.solver.stages import least_overflow, solve_stages


def test_least_overflow_says_how_much_is_missing():
    found = 0
    for seed in range(30):
        chain = replace(random_chain(seed), memory_bytes=MIB)
        counts = least_overflow(chain)
        over = overflow_bytes(chain, counts)
        if over > 0:
            found += 1
            assert solve_stages(replace(chain, memory_bytes=MIB + over + 65536)).counts is not None, seed
            short = replace(chain, memory_bytes=MIB + over - 65536)
            assert solve_stages(short).state is SolveState.INFEASIBLE, seed
    assert found > 20


def test_more_stages_than_segments_is_infeasible():
    chain = random_chain(4)
    count = chain.num_segments + 1
    chain = replace(
        chain, stages=(StageLimits(),) * count, ranks=tuple((s,) for s in range(count)), in_flight=(((1,),),) * count
    )
    solution = solve_stages(chain)
    assert (solution.state, solution.counts, solution.bound_us) == (SolveState.INFEASIBLE, None, float("inf"))
    assert least_overflow(chain) is None


def test_deterministic():
    assert solve_stages(random_chain(7)) == solve_stages(random_chain(7))


def eighty_layers(num_ranks: int) -> ChainProblem:
    block = tuple(
        OptionCost(time_us=t, end_us=1.0, state_bytes=100 * MIB, activation_bytes=a * MIB, transient_bytes=50 * MIB)
        for t, a in ((1000.0, 400), (1100.0, 200), (1333.0, 20))
    )
    ends = (OptionCost(time_us=300.0, end_us=1.0, state_bytes=MIB, activation_bytes=MIB, transient_bytes=0),)
    return ChainProblem(
        lengths=(1, 80, 1), options=(ends, block, ends), num_microbatches=64, memory_bytes=20000 * MIB,
        stages=(StageLimits(fixed_us=5.0),) * num_ranks, ranks=tuple((rank,) for rank in range(num_ranks)),
        in_flight=tuple(((num_ranks - rank,),) for rank in range(num_ranks)),
    )  # fmt: skip


def test_eighty_layers_in_sixteen_stages_is_quick():
    solution = solve_stages(eighty_layers(16), gap=1e-3)
    assert solution.counts is not None
    assert [sum(map(sum, stage)) for stage in solution.counts] == pytest.approx([5.125] * 16, abs=1.2)


def test_pinned_cuts_are_kept():
    cuts = (3, 40, 81)
    solution = solve_stages(replace(eighty_layers(4), cuts=cuts, memory_bytes=60000 * MIB))
    sizes = [sum(map(sum, stage)) for stage in solution.counts]
    assert tuple(sum(sizes[: s + 1]) for s in range(3)) == cuts
