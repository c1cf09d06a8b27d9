"""Elimination against exhaustive search over random tables."""

import itertools
import math
import random

import numpy as np
import pytest

from autoplan.solver.eliminate import min_marginals, minimise, plan_elimination


def random_network(seed: int):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(1, 6))]
    scopes = [
        tuple(rng.sample(range(len(sizes)), rng.randint(1, min(3, len(sizes))))) for _ in range(rng.randint(0, 8))
    ]
    forbidden = rng.choice((0.0, 0.2, 0.6))
    tables = [
        np.array([math.inf if rng.random() < forbidden else float(rng.randint(0, 9)) for _ in range(count)]).reshape(
            shape
        )
        for shape in ([sizes[v] for v in scope] for scope in scopes)
        for count in (math.prod(shape),)
    ]
    return sizes, scopes, tables


def cost_of(scopes, tables, states) -> float:
    return sum(float(table[tuple(states[v] for v in scope)]) for scope, table in zip(scopes, tables, strict=True))


@pytest.mark.parametrize("seed", range(150))
def test_equals_exhaustive_search(seed):
    sizes, scopes, tables = random_network(seed)
    costs = {states: cost_of(scopes, tables, states) for states in itertools.product(*map(range, sizes))}
    plan = plan_elimination(sizes, scopes)
    found = minimise(plan, tables)
    assert found.cost == min(costs.values())
    assert costs[found.states] == found.cost
    for variable, marginal in enumerate(min_marginals(plan, tables)):
        for state, cost in enumerate(marginal):
            assert cost == min(c for states, c in costs.items() if states[variable] == state)


def test_of_equal_states_the_first_wins():
    plan = plan_elimination([3, 3], [(0, 1)])
    assert minimise(plan, [np.zeros((3, 3))]).states == (0, 0)


def test_a_chain_needs_no_large_table():
    plan = plan_elimination([5] * 100, [(i, i + 1) for i in range(99)])
    assert plan.largest == 25


def test_a_ring_needs_tables_over_three():
    plan = plan_elimination([5] * 10, [(i, (i + 1) % 10) for i in range(10)])
    assert plan.largest == 125
