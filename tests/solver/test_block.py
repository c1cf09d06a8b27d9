"""The ILP of one class against exhaustive search."""

import random
from dataclasses import replace

import oracle
import pytest
from toy_cost import ToyCost

from autoplan.cluster import Group
from autoplan.ir import TensorMeta
from autoplan.sharding import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Shard, Strategy
from autoplan.solver.block import solve_block
from autoplan.solver.choice import objective, resolve
from autoplan.solver.milp import SolveState
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

PLACEMENTS = (Shard(0), Shard(1), REPLICATE, REPLICATE_PARTIAL_GRAD, PARTIAL)
PRICES = (
    Prices(),
    Prices(step=0.5, state_us_per_byte=0.01),
    Prices(step=1.0, state_us_per_byte=0.05, activation_us_per_byte=0.03),
)


AXIS = Axis(group=Group(size=2, per_node=2), cost=ToyCost())


def random_problem(seed: int, num_nodes: int):
    rng = random.Random(seed)
    metas = TensorMeta(shape=(4, 8), dtype="float32")
    names, nodes = ["x", "c"], []
    num_params = rng.randint(1, 2)
    for i in range(num_nodes):
        operands = (names[-1] if rng.random() < 0.7 else rng.choice(names),)
        is_view = rng.random() < 0.3
        if not is_view and rng.random() < 0.5:
            operands += (f"param:{rng.randrange(num_params)}",)
        results = (f"n{i}.0", f"n{i}.1") if rng.random() < 0.2 else (f"n{i}",)
        candidates = tuple(random_candidate(rng, operands, results) for _ in range(rng.randint(1, 3)))
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
        sources = param_sources({place for name, place in wants_of(tuple(nodes)) if name == f"param:{i}"}, True)
        sync = tuple(5.0 * (s == REPLICATE_PARTIAL_GRAD) for s in sources)
        values.append(
            ValueProblem(name=f"param:{i}", meta=metas, origin="param", needs_grad=True, sources=sources, sync_us=sync)
        )
    values += [
        ValueProblem(name=name, meta=metas, origin="node", needs_grad=rng.random() < 0.8, sources=())
        for name in names[2:]
    ]
    outputs = ((names[-1], rng.choice((None, REPLICATE, Shard(1)))),)
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


@pytest.mark.parametrize("seed", range(60))
def test_equals_exhaustive_search(seed):
    problem = random_problem(seed, num_nodes=2 + seed % 5)
    prices = PRICES[seed % len(PRICES)]
    param = next(v for v in problem.values if v.origin == "param")
    fixed = {param.name: param.sources[seed % len(param.sources)]} if seed % 2 else {}
    solution = solve_block(problem, prices, fixed)
    assert solution.state is SolveState.OPTIMAL
    best = oracle.best_block_cost(problem, prices, fixed)
    mine = oracle.cost_of(problem, solution.choice.candidates, dict(solution.choice.params), prices)
    assert mine == pytest.approx(best, abs=2e-3)
    assert solution.objective == pytest.approx(best, abs=2e-3)
    assert objective(resolve(problem, solution.choice), prices) == pytest.approx(mine, abs=1e-9)


def test_a_corrupted_cost_is_noticed():
    noticed = 0
    for seed in range(12):
        problem = random_problem(seed, num_nodes=4)
        moves = {key: replace(move, forward_us=0.0, backward_us=0.0) for key, move in problem.moves.items()}
        wrong = solve_block(replace(problem, moves=moves), Prices()).choice
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
