"""The cut into stages against brute force over every cut and every option."""

import random
from dataclasses import replace

import oracle
import pytest

from autoplan.solver.milp import SolveState
from autoplan.solver.stages import ChainProblem, OptionCost, SharedParam, StageLimits, solve_stages

MIB = 2**20


def random_chain(seed: int) -> ChainProblem:
    rng = random.Random(seed)
    lengths = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 3)))
    options = tuple(
        tuple(
            OptionCost(
                time_us=rng.randint(1, 20),
                end_us=rng.randint(0, 5),
                state_bytes=rng.randint(0, 6) * MIB,
                activation_bytes=rng.randint(0, 4) * MIB,
                transient_bytes=rng.randint(0, 5) * MIB,
            )
            for _ in range(rng.randint(1, 2))
        )
        for _ in lengths
    )
    num_stages = rng.randint(1, 3)
    microbatches = rng.randint(1, 6)
    stages = tuple(
        StageLimits(in_flight=min(microbatches, num_stages - s), fixed_us=rng.randint(0, 3), fixed_bytes=MIB)
        for s in range(num_stages)
    )
    shared = (SharedParam(state_bytes=3 * MIB, end_us=4.0),) if rng.random() < 0.5 else ()
    return ChainProblem(
        lengths=lengths, options=options, stages=stages, num_microbatches=microbatches,
        memory_bytes=rng.randint(10, 45) * MIB, shared=shared,
        readers=((0, len(lengths) - 1),) if shared else (),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_equals_brute_force(seed):
    chain = random_chain(seed)
    best = oracle.best_chain_us(chain)
    solution = solve_stages(chain)
    if best is None:
        assert solution.state is SolveState.INFEASIBLE
    else:
        assert solution.state is SolveState.OPTIMAL
        assert solution.objective_us == pytest.approx(best, abs=1e-4)


def test_both_ends_are_met_by_the_random_chains():
    answers = [oracle.best_chain_us(random_chain(seed)) is None for seed in range(60)]
    assert 5 < sum(answers) < 55


def test_least_memory_says_how_much_is_missing():
    chain = replace(random_chain(3), memory_bytes=1 * MIB)
    over = solve_stages(chain, least_memory=True).overflow_bytes
    assert solve_stages(replace(chain, memory_bytes=chain.memory_bytes + over + 65536)).counts is not None
    assert solve_stages(replace(chain, memory_bytes=chain.memory_bytes + over - 65536)).state is SolveState.INFEASIBLE


def test_more_stages_than_segments_is_infeasible():
    chain = random_chain(4)
    stage = StageLimits(in_flight=1, fixed_us=0.0, fixed_bytes=0)
    chain = replace(chain, stages=(stage,) * (sum(chain.lengths) + 1))
    assert solve_stages(chain).state is SolveState.INFEASIBLE


def test_deterministic():
    assert solve_stages(random_chain(7)) == solve_stages(random_chain(7))


def test_eighty_layers_in_sixteen_stages_is_quick():
    block = tuple(
        OptionCost(time_us=t, end_us=1.0, state_bytes=100 * MIB, activation_bytes=a * MIB, transient_bytes=50 * MIB)
        for t, a in ((1000.0, 400), (1100.0, 200), (1333.0, 20))
    )
    ends = (OptionCost(time_us=300.0, end_us=1.0, state_bytes=MIB, activation_bytes=MIB, transient_bytes=0),)
    chain = ChainProblem(
        lengths=(1, 80, 1), options=(ends, block, ends), num_microbatches=64, memory_bytes=20000 * MIB,
        stages=tuple(StageLimits(in_flight=16 - s, fixed_us=5.0, fixed_bytes=0) for s in range(16)),
    )  # fmt: skip
    solution = solve_stages(chain, gap=1e-3)
    assert solution.counts is not None
    assert [sum(map(sum, stage)) for stage in solution.counts] == pytest.approx([5.125] * 16, abs=1.2)
