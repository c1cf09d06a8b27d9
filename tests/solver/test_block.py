"""One class of segments: elimination and the ILP against exhaustive search, and against each other."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import oracle
import pytest
from toy_cost import ToyCost

from autoplan.cluster import Group
from autoplan.ir import TensorMeta
from autoplan.sharding import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Shard, Strategy
from autoplan.solver.block import (
    Limits,
    alternatives,
    make_block,
    recompute_us_per_byte,
    solve,
    solve_block,
    solve_sweep,
)
from autoplan.solver.choice import TIE_BREAK_US, activation_bytes, objective, resolve
from autoplan.solver.eliminate import minimise
from autoplan.solver.ilp import solve_ilp
from autoplan.solver.milp import SolveState
from autoplan.solver.narrow import bound, narrow
from autoplan.solver.network import UNITS_PER_US, tables_at
from autoplan.solver.problem import (
    Axis,
    Candidate,
    NodeProblem,
    Prices,
    ValueProblem,
    make_problem,
    param_sources,
    wants_of,
)
from autoplan.solver.shares import projected

PLACEMENTS = (Shard(0), Shard(1), REPLICATE, REPLICATE_PARTIAL_GRAD, PARTIAL)
PRICES = (
    Prices(),
    Prices(step=0.5, state_us_per_byte=0.01),
    Prices(step=1.0, state_us_per_byte=0.05, activation_us_per_byte=0.03),
)


DIRECT, NARROWED = Limits(direct=2**22), Limits(direct=0)
AXIS = Axis(group=Group(size=2, per_node=2), cost=ToyCost())


def random_problem(seed: int, num_nodes: int, *, most_candidates: int = 3, most_params: int = 2):
    rng = random.Random(seed)
    metas = TensorMeta(shape=(4, 8), dtype="float32")
    names, nodes = ["x", "c"], []
    num_params = rng.randint(1, most_params)
    for i in range(num_nodes):
        operands = (names[-1] if rng.random() < 0.7 else rng.choice(names),)
        is_view = rng.random() < 0.3
        if not is_view and rng.random() < 0.5:
            operands += (f"param:{rng.randrange(num_params)}",)
        elif not is_view and rng.random() < 0.3:
            operands += (rng.choice(names),)
        results = (f"n{i}.0", f"n{i}.1") if rng.random() < 0.2 else (f"n{i}",)
        candidates = tuple(random_candidate(rng, operands, results) for _ in range(rng.randint(1, most_candidates)))
        nodes.append(
            NodeProblem(name=f"n{i}", operands=operands, results=results, candidates=candidates, is_view=is_view)
        )
        names += results
    values = [
        ValueProblem(
            name="x", meta=metas, origin="input", needs_grad=True, sources=(rng.choice((REPLICATE, Shard(1))),)
        ),
        ValueProblem(name="c", meta=metas, origin="given", needs_grad=True, sources=(REPLICATE,)),
    ]
    for i in range(num_params):
        sources = param_sources([place for name, place in wants_of(tuple(nodes)) if name == f"param:{i}"], True)
        sync = tuple(5.0 * (s == REPLICATE_PARTIAL_GRAD) for s in sources)
        values.append(
            ValueProblem(name=f"param:{i}", meta=metas, origin="param", needs_grad=True, sources=sources, sync_us=sync)
        )
    values += [
        ValueProblem(name=name, meta=metas, origin="node", needs_grad=rng.random() < 0.8, sources=())
        for name in names[2:]
    ]
    leaving = dict.fromkeys((names[-1], rng.choice(names[2:])))
    outputs = tuple((name, rng.choice((None, REPLICATE, Shard(1)))) for name in leaving)
    return make_problem(tuple(nodes), tuple(values), outputs, AXIS)


def random_candidate(rng: random.Random, operands, results) -> Candidate:
    strategy = Strategy(
        inputs=tuple(rng.choice(PLACEMENTS) for _ in operands), outputs=tuple(rng.choice(PLACEMENTS) for _ in results)
    )
    pairs = [*zip(operands, strategy.inputs, strict=True), *zip(results, strategy.outputs, strict=True)]
    saved = tuple(pair for pair in pairs if rng.random() < 0.5)
    return Candidate(
        strategy=strategy,
        forward_us=rng.choice((0.0, 1.0, 3.0)),
        backward_us=rng.choice((0.0, 2.0)),
        saved=saved,
        extra_bytes=rng.choice((0, 0, 64)),
    )


def random_pins(problem, seed: int):
    param = next(v for v in problem.values if v.origin == "param")
    return {param.name: param.sources[seed % len(param.sources)]} if seed % 2 else {}


@pytest.mark.parametrize("way", [solve_block, solve_ilp])
@pytest.mark.parametrize("seed", range(60))
def test_equals_exhaustive_search(seed, way):
    problem = random_problem(seed, num_nodes=2 + seed % 5)
    prices, fixed = PRICES[seed % len(PRICES)], random_pins(problem, seed)
    solution = way(problem, prices, fixed)
    assert solution.state is SolveState.OPTIMAL
    best = oracle.best_block_cost(problem, prices, fixed)
    mine = oracle.cost_of(problem, solution.choice.candidates, dict(solution.choice.params), prices)
    assert mine == pytest.approx(best, abs=2e-3)
    assert solution.objective == pytest.approx(best, abs=2e-3)
    assert objective(resolve(problem, solution.choice), prices) == pytest.approx(mine, abs=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_elimination_equals_the_ilp(seed):
    """Larger than exhaustive search can: values with many readers, shared parameters, chains of views."""
    problem = random_problem(1000 + seed, num_nodes=14, most_candidates=6, most_params=4)
    prices, fixed = PRICES[seed % len(PRICES)], random_pins(problem, seed)
    block = make_block(problem)
    mine, ilp = solve(block, prices, fixed, limits=DIRECT), solve_ilp(problem, prices, fixed)
    assert ilp.state is SolveState.OPTIMAL
    assert mine.objective == pytest.approx(ilp.objective, abs=1e-3)
    assert solve(block, prices, fixed, limits=NARROWED).objective == pytest.approx(ilp.objective, abs=1e-3)
    resolved = resolve(problem, mine.choice)
    assert mine.objective == pytest.approx(objective(resolved, prices) + TIE_BREAK_US * len(resolved.moves), abs=1e-4)


def test_some_values_have_many_readers():
    """So that the test above meets hubs."""
    problems = [random_problem(1000 + seed, num_nodes=14, most_candidates=6, most_params=4) for seed in range(30)]
    most = [max(Counter(name for n in p.nodes for name in set(n.operands)).values()) for p in problems]
    assert sum(readers > 2 for readers in most) >= 10


@pytest.mark.parametrize("seed", range(24))
def test_alternatives_equal_exhaustive_search(seed):
    problem = random_problem(seed, num_nodes=2 + seed % 4)
    prices, fixed = PRICES[seed % len(PRICES)], random_pins(problem, seed)
    costs = [(choice, oracle.cost_of(problem, *choice, prices)) for choice in oracle.all_choices(problem, fixed)]
    found = alternatives(problem, prices, fixed)
    for i, (node, priced) in enumerate(zip(problem.nodes, found.nodes, strict=True)):
        assert tuple(candidate for candidate, _ in priced) == node.candidates
        for k, (_, cost) in enumerate(priced):
            assert cost == pytest.approx(min(c for (picks, _), c in costs if picks[i] == k), abs=2e-3)
    for name, priced in found.params:
        for place, cost in priced:
            best = min((c for (_, params), c in costs if params[name] == place), default=float("inf"))
            assert cost == pytest.approx(best, abs=2e-3)


@pytest.mark.parametrize("seed", range(60))
def test_narrowing_keeps_the_optimum(seed):
    problem = random_problem(seed, num_nodes=2 + seed % 5)
    prices, fixed = PRICES[seed % len(PRICES)], random_pins(problem, seed)
    solution = solve(make_block(problem), prices, fixed, limits=NARROWED)
    best = oracle.best_block_cost(problem, prices, fixed)
    assert oracle.cost_of(problem, solution.choice.candidates, dict(solution.choice.params), prices) == pytest.approx(
        best, abs=2e-3
    )


def test_narrowing_leaves_out_most_candidates():
    problems = [random_problem(1000 + seed, num_nodes=14, most_candidates=6, most_params=4) for seed in range(10)]
    before = after = 0
    for problem in problems:
        narrowed = narrow(bound(make_block(problem).network(Prices(), relaxed=True), Prices(), {})).problem
        before += sum(len(node.candidates) for node in problem.nodes)
        after += sum(len(node.candidates) for node in narrowed.nodes)
    assert after < 0.8 * before


@pytest.mark.parametrize("seed", range(20))
def test_a_relaxed_network_is_a_lower_bound(seed):
    problem = random_problem(1000 + seed, num_nodes=14, most_candidates=6, most_params=4)
    prices = PRICES[seed % len(PRICES)]
    relaxed = make_block(problem).network(prices, relaxed=True)
    bound = minimise(relaxed.plan, tables_at(relaxed, prices, {})).cost / UNITS_PER_US
    assert bound <= solve_block(problem, prices).objective + 1e-4


@pytest.mark.parametrize("seed", range(20))
def test_better_shares_bound_from_both_sides(seed):
    problem = random_problem(1000 + seed, num_nodes=14, most_candidates=6, most_params=4)
    prices = PRICES[seed % len(PRICES)]
    relaxed = make_block(problem).network(prices, relaxed=True)
    first = minimise(relaxed.plan, tables_at(relaxed, prices, {})).cost / UNITS_PER_US
    found, best_us = bound(relaxed, prices, {}), solve_block(problem, prices).objective
    assert first <= found.least_us <= best_us + 1e-4
    resolved = resolve(problem, found.best)
    assert found.most_us == objective(resolved, prices) + TIE_BREAK_US * len(resolved.moves)
    assert found.most_us >= best_us - 1e-4
    assert not found.is_proven or found.most_us == pytest.approx(best_us, abs=1e-4)


def test_better_shares_close_most_of_the_gap():
    first = last = proven = 0.0
    for seed in range(20):
        problem = random_problem(1000 + seed, num_nodes=14, most_candidates=6, most_params=4)
        relaxed = make_block(problem).network(Prices(), relaxed=True)
        found, best_us = bound(relaxed, Prices(), {}), solve_block(problem, Prices()).objective
        first += best_us - minimise(relaxed.plan, tables_at(relaxed, Prices(), {})).cost / UNITS_PER_US
        last += best_us - found.least_us
        proven += found.is_proven
    assert last < 0.3 * first
    assert proven >= 3


def test_projected_shares_are_the_nearest_that_add_up():
    rng = np.random.default_rng(0)
    for _ in range(50):
        wished = rng.normal(0.3, 0.5, size=(4, 3))
        found = projected(wished)
        assert found.min() >= 0
        assert found.sum(axis=0) == pytest.approx(1.0)
        others = rng.dirichlet(np.ones(4), size=(200, 3)).transpose(0, 2, 1)
        assert ((others - wished) ** 2).sum(axis=(1, 2)).min() >= ((found - wished) ** 2).sum() - 1e-12
    assert (projected(np.full((4, 2), 0.25)) == 0.25).all()


@pytest.mark.parametrize("limits", [NARROWED, Limits(direct=0, most=0)])
def test_alternatives_one_by_one_are_the_same(limits):
    problem = random_problem(1, num_nodes=4)
    expected = alternatives(problem, PRICES[2])
    found = alternatives(problem, PRICES[2], limits=replace(limits, most=0))
    for mine, theirs in zip(
        (*found.nodes, *(p for _, p in found.params)), (*expected.nodes, *(p for _, p in expected.params)), strict=True
    ):
        assert [c for c, _ in mine] == [c for c, _ in theirs]
        assert [cost for _, cost in mine] == pytest.approx([cost for _, cost in theirs], abs=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_too_wide_a_problem_goes_to_the_ilp(seed, monkeypatch):
    problem, calls = random_problem(seed, num_nodes=6), []
    monkeypatch.setattr("autoplan.solver.block.solve_ilp", lambda *args: calls.append(args) or solve_ilp(*args))
    found = solve(make_block(problem), PRICES[1], limits=Limits(direct=0, most=0))
    assert len(calls) == 1
    assert found.objective == pytest.approx(solve_block(problem, PRICES[1]).objective, abs=1e-3)


def test_a_narrowed_problem_that_is_still_too_wide_goes_to_the_ilp(monkeypatch):
    problem, calls = random_problem(1012, num_nodes=14, most_candidates=6, most_params=4), []
    monkeypatch.setattr("autoplan.solver.block.solve_ilp", lambda *args: calls.append(args) or solve_ilp(*args))
    found = solve(make_block(problem), PRICES[2], limits=Limits(direct=0, most=200))
    narrowed = calls[0][0]
    assert sum(len(n.candidates) for n in narrowed.nodes) < sum(len(n.candidates) for n in problem.nodes)
    assert found.objective == pytest.approx(solve_block(problem, PRICES[2]).objective, abs=1e-3)
    assert objective(resolve(problem, found.choice), PRICES[2]) == pytest.approx(found.objective, abs=2e-3)


@pytest.mark.parametrize("seed", range(10))
def test_the_sweep_ends_with_what_saves_memory_cheaply(seed):
    problem = random_problem(seed, num_nodes=8, most_candidates=5)
    solutions = solve_sweep(problem, PRICES[:2])
    assert len(solutions) == 3
    dear, light = (resolve(problem, solution.choice) for solution in solutions[1:])
    price = replace(PRICES[1], activation_us_per_byte=recompute_us_per_byte(dear))
    assert solutions[2].objective == pytest.approx(solve_ilp(problem, price).objective, abs=1e-3)
    assert activation_bytes(light) <= activation_bytes(dear)


class Free:
    """Everything costs nothing."""

    def compute_us(self, work):
        return 0.0

    def collective_us(self, collective):
        return 0.0


def test_a_corrupted_cost_is_noticed():
    noticed = 0
    for seed in range(12):
        problem = random_problem(seed, num_nodes=4)
        free = make_problem(problem.nodes, problem.values, problem.outputs, replace(AXIS, cost=Free(), moves={}))
        wrong = solve_block(free, Prices()).choice
        cost = oracle.cost_of(problem, wrong.candidates, dict(wrong.params), Prices())
        noticed += cost > oracle.best_block_cost(problem, Prices(), {}) + 2e-3
    assert noticed >= 3


def test_same_problem_same_choice():
    problem = random_problem(5, num_nodes=6)
    assert solve_block(problem, PRICES[2]).choice == solve_block(problem, PRICES[2]).choice


def test_a_move_is_shared_by_its_readers():
    meta = TensorMeta(shape=(4, 8), dtype="float32")
    read = Candidate(strategy=Strategy(inputs=(REPLICATE,), outputs=(REPLICATE,)), forward_us=1.0, backward_us=0.0)
    nodes = tuple(NodeProblem(name=f"n{i}", operands=("x",), results=(f"n{i}",), candidates=(read,)) for i in range(3))
    values = (
        ValueProblem(name="x", meta=meta, origin="input", needs_grad=True, sources=(Shard(0),)),
        *(ValueProblem(name=n.name, meta=meta, origin="node", needs_grad=True, sources=()) for n in nodes),
    )
    problem = make_problem(nodes, values, (), AXIS)
    move = problem.moves["x", Shard(0), REPLICATE]
    assert solve_block(problem, Prices()).objective == pytest.approx(3.0 + move.total_us, abs=1e-3)
