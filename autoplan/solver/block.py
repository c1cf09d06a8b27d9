"""One class of segments, exactly: by elimination of variables, or where that needs too large a table by an ILP.

Both minimise ``choice.objective`` with a tie-break per move, and the tests hold them against each other.
docs/formulation.md has the mathematics.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autoplan.sharding import Placement
from autoplan.solver.choice import BlockSolution, Choice, Resolved, activation_bytes, resolve
from autoplan.solver.eliminate import LARGEST_TABLE, Costs, Minimum, min_marginals, minimise
from autoplan.solver.ilp import solve_ilp
from autoplan.solver.milp import SolveState
from autoplan.solver.network import (
    UNITS_PER_US,
    Network,
    ValueFacts,
    build_network,
    tables_at,
    value_facts,
    with_memory,
)
from autoplan.solver.problem import Candidate, Prices, Problem

Fixed = Mapping[str, Placement]
_Choice = TypeVar("_Choice", Candidate, Placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A problem with what several solves of it share."""

    problem: Problem
    facts: tuple[ValueFacts, ...] = field(repr=False)
    largest_table: int
    """Entries; beyond these the ILP is solved."""
    networks: dict[bool, Network] = field(default_factory=dict, repr=False)
    """Without and with what is kept for backward."""

    def network(self, prices: Prices) -> Network:
        """The tables that these prices need."""
        if False not in self.networks:
            self.networks[False] = build_network(self.problem, self.facts)
        if prices.activation_us_per_byte <= 0:
            return self.networks[False]
        if True not in self.networks:
            self.networks[True] = with_memory(self.networks[False], self.facts)
        return self.networks[True]

    def fits(self, prices: Prices) -> bool:
        """Whether elimination needs no table that is too large."""
        return self.network(prices).plan.largest <= self.largest_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The least objective in us, tie-break included, of any answer that makes one given choice; infinite for none."""

    nodes: tuple[tuple[tuple[Candidate, float], ...], ...]
    """By node of the problem: every candidate."""
    params: tuple[tuple[str, tuple[tuple[Placement, float], ...]], ...]
    """By parameter: every placement it may live in."""


def make_block(problem: Problem, *, largest_table: int | None = None) -> Block:
    """Prepare a problem to be solved at several prices."""
    largest = LARGEST_TABLE if largest_table is None else largest_table
    return Block(problem=problem, facts=value_facts(problem), largest_table=largest)


def solve_block(
    problem: Problem, prices: Prices, fixed: Fixed | None = None, time_limit_s: float = 10.0
) -> BlockSolution:
    """Best choice for one class. ``fixed`` pins parameters, by value name, to one of their sources.

    Deterministic: same problem, same choice. No answer is a state of the solution, never an exception. The time limit
    is that of the ILP; elimination takes milliseconds.
    """
    return solve(make_block(problem), prices, fixed, time_limit_s)


def solve(block: Block, prices: Prices, fixed: Fixed | None = None, time_limit_s: float = 10.0) -> BlockSolution:
    """As ``solve_block``, of a problem that was prepared."""
    if not block.fits(prices):
        return solve_ilp(block.problem, prices, fixed, time_limit_s)
    start = time.monotonic()
    network = block.network(prices)
    found = minimise(network.plan, tables_at(network, prices, fixed or {}))
    assert math.isfinite(found.cost), "every node has a candidate and every move a price"
    return BlockSolution(
        state=SolveState.OPTIMAL,
        choice=_choice(network, found),
        objective=found.cost / UNITS_PER_US,
        seconds=time.monotonic() - start,
    )


def _choice(network: Network, found: Minimum) -> Choice:
    nodes = len(network.problem.nodes)
    sources = {v.name: v.sources for v in network.problem.values if v.origin == "param"}
    states = zip(network.params, found.states[nodes:], strict=False)
    return Choice(candidates=found.states[:nodes], params=tuple((name, sources[name][state]) for name, state in states))


def solve_sweep(problem: Problem, prices: Sequence[Prices], fixed: Fixed | None = None) -> tuple[BlockSolution, ...]:
    """One solve per price, then one more at the last of them with a price on memory that is kept for backward.

    That price is what full recomputation pays per byte it frees, in the answer before: the last solve finds what
    frees memory for less.
    """
    block = make_block(problem)
    found = [solve(block, price, fixed) for price in prices]
    if found[-1].choice is not None:
        rate = recompute_us_per_byte(resolve(problem, found[-1].choice))
        found.append(solve(block, replace(prices[-1], activation_us_per_byte=rate), fixed))
    return tuple(found)


def recompute_us_per_byte(resolved: Resolved) -> float:
    """Time of the forward pass over the bytes it leaves for backward; 0 where it leaves none."""
    forward = sum(candidate.forward_us + candidate.internal_us for _, candidate in resolved.nodes)
    moved = sum(resolved.move(key).forward_us for key in resolved.moves)
    kept = activation_bytes(resolved)
    return (forward + moved) / kept if kept else 0.0


def alternatives(problem: Problem, prices: Prices, fixed: Fixed | None = None) -> Alternatives:
    """What each single choice costs at best, the others free: the price of every candidate and every placement."""
    block = make_block(problem)
    if not block.fits(prices):
        return _alternatives_by_ilp(problem, prices, fixed or {})
    network = block.network(prices)
    costs = min_marginals(network.plan, tables_at(network, prices, fixed or {}))
    nodes = (_priced(n.candidates, costs[i]) for i, n in enumerate(problem.nodes))
    sources = {v.name: v.sources for v in problem.values if v.origin == "param"}
    params = ((name, _priced(sources[name], costs[len(problem.nodes) + i])) for i, name in enumerate(network.params))
    return Alternatives(nodes=tuple(nodes), params=tuple(params))


def _priced(choices: tuple[_Choice, ...], costs: Costs) -> tuple[tuple[_Choice, float], ...]:
    return tuple((choice, float(cost) / UNITS_PER_US) for choice, cost in zip(choices, costs, strict=True))


def _alternatives_by_ilp(problem: Problem, prices: Prices, fixed: Fixed) -> Alternatives:
    def with_node(index: int, candidate: Candidate) -> float:
        nodes = list(problem.nodes)
        nodes[index] = replace(nodes[index], candidates=(candidate,))
        return solve_ilp(replace(problem, nodes=tuple(nodes)), prices, fixed).objective

    def with_param(name: str, placement: Placement) -> float:
        if fixed.get(name, placement) != placement:
            return math.inf
        return solve_ilp(problem, prices, {**fixed, name: placement}).objective

    return Alternatives(
        nodes=tuple(tuple((c, with_node(i, c)) for c in node.candidates) for i, node in enumerate(problem.nodes)),
        params=tuple(
            (v.name, tuple((place, with_param(v.name, place)) for place in v.sources))
            for v in problem.values
            if v.origin == "param"
        ),
    )
