"""Problems of real models: what is remembered changes nothing, elimination equals the ILP, gradients of parameters."""

from functools import cache

import llama
import nanogpt
import pytest
from toy_cost import ToyCost

from autoplan.cluster import Group
from autoplan.solver.batch import split_batch
from autoplan.solver.block import alternatives, solve_block
from autoplan.solver.build import build_problem, make_model
from autoplan.solver.choice import resolve
from autoplan.solver.ilp import solve_ilp
from autoplan.solver.options import layout_cost
from autoplan.solver.problem import Axis, Prices
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

PRICES = (
    Prices(step=1 / 16),
    Prices(step=1.0, state_us_per_byte=1e-4),
    Prices(step=1.0, state_us_per_byte=1e-4, activation_us_per_byte=1e-4),
)


@cache
def segmented(name: str):
    if name == "llama":
        config = llama.Config(num_layers=2, width=64, hidden=96)
        return segment_graph(trace_model(llama.Llama(config), llama.example_inputs(8)).graph)
    return segment_graph(trace_model(nanogpt.GPT(nanogpt.Config(num_layers=2)), nanogpt.example_inputs(8)).graph)


@cache
def model(name: str, parts: int):
    return make_model(segmented(name), split_batch(segmented(name)), parts)


def axis(degree: int) -> Axis:
    return Axis(group=Group(size=degree, per_node=degree), cost=ToyCost())


def problems(name: str, parts: int, sequence: bool, where: Axis):
    sg = segmented(name)
    return [build_problem(model(name, parts), sg.representative(k), where, sequence) for k in range(len(sg.kind_names))]


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_what_an_axis_remembers_changes_nothing(degree):
    kept = axis(degree)
    for name in ("llama", "nanogpt"):
        for parts in (1, 2, 8):
            for sequence in (False, True):
                assert problems(name, parts, sequence, kept) == problems(name, parts, sequence, axis(degree))


@pytest.mark.parametrize("prices", PRICES)
@pytest.mark.parametrize("name", ["llama", "nanogpt"])
def test_elimination_equals_the_ilp(name, prices):
    for problem in problems(name, 2, True, axis(2)):
        found = solve_block(problem, prices)
        assert found.objective == pytest.approx(solve_ilp(problem, prices).objective, rel=1e-7, abs=1e-3)


def test_the_best_of_all_alternatives_is_the_answer_and_is_taken():
    problem = problems("llama", 2, True, axis(2))[1]
    solution, found = solve_block(problem, PRICES[1]), alternatives(problem, PRICES[1])
    for index, priced in zip(solution.choice.candidates, found.nodes, strict=True):
        assert priced[index][1] == min(cost for _, cost in priced) == solution.objective
    placements = dict(solution.choice.params)
    for name, priced in found.params:
        assert dict(priced)[placements[name]] == min(cost for _, cost in priced) == solution.objective


def test_gradients_of_parameters_are_half_of_a_product_and_all_of_an_embedding():
    for problem in problems("llama", 2, False, axis(2)):
        resolved = resolve(problem, solve_block(problem, PRICES[0]).choice)
        total = 0.0
        for node, candidate in resolved.nodes:
            params = sum(name.startswith("param:") for name in node.operands)
            share = {"embedding": 1.0, "linear": 0.5}.get(node.name.split("_")[0], 0.0)
            assert candidate.weight_us == pytest.approx(candidate.backward_us * share * (params > 0)), node.name
            total += candidate.weight_us
        for recompute in ("none", "full"):
            assert layout_cost(resolved, recompute).weight_us == pytest.approx(total)
        assert total > 0
