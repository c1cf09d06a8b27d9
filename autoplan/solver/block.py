"""One class of segments, exactly, by elimination of variables.

Where that needs too large a table, a relaxed network bounds the best answer, and often finds it; otherwise it narrows
the problem (``narrow.py``). Where that is still too wide, an ILP solves what is left (``ilp.py``). All ways minimise
``choice.objective`` with a tie-break per move, and the tests hold them against each other. docs/formulation.md has the
mathematics.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from autoplan.sharding import Placement
from autoplan.solver.choice import BlockSolution, Resolved, activation_bytes, resolve
from autoplan.solver.eliminate import Costs, min_marginals, minimise
from autoplan.solver.ilp import solve_ilp
from autoplan.solver.milp import SolveState
from autoplan.solver.narrow import bound, narrow
from autoplan.solver.network import (
    UNITS_PER_US,
    Network,
    ValueFacts,
    build_network,
    choice_of,
    tables_at,
    value_facts,
    with_memory,
)
from autoplan.solver.problem import Candidate, Prices, Problem
from autoplan.solver.shares import Shares

Fixed = Mapping[str, Placement]
_Choice = TypeVar("_Choice", Candidate, Placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Entries of the largest table, 8 bytes each."""

    direct: int = 2**18
    """Beyond these a problem is narrowed first."""
    most: int = 2**22
    """Beyond these, narrowed or relaxed, the ILP is solved."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A problem with what several solves of it share."""

    problem: Problem
    facts: tuple[ValueFacts, ...] = field(repr=False)
    networks: dict[tuple[bool, bool], Network] = field(default_factory=dict, repr=False)
    """By whether they count what is kept for backward, and whether they are relaxed."""
    shares: list[tuple[Shares, ...]] = field(default_factory=list, repr=False)
    """Good ones for the relaxed networks, from the last solve."""

    @property
    def width(self) -> int:
        """Entries of the largest table that elimination needs at time alone: a matter of the shapes of the values."""
        widths, key = self.problem.moves.axis.widths, tuple(fact.shape.number for fact in self.facts)
        if key not in widths:
            widths[key] = self.network(Prices()).plan.largest
        return widths[key]

    def network(self, prices: Prices, *, relaxed: bool = False) -> Network:
        """The tables that these prices need."""
        counts_memory = prices.activation_us_per_byte > 0
        key = counts_memory, relaxed
        if key not in self.networks:
            self.networks[key] = (
                with_memory(self.network(Prices(), relaxed=relaxed), self.facts)
                if counts_memory
                else build_network(self.problem, self.facts, relaxed=relaxed)
            )
        return self.networks[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The least objective in us, tie-break included, of any answer that makes one given choice; infinite for none."""

    nodes: tuple[tuple[tuple[Candidate, float], ...], ...]
    """By node of the problem: every candidate."""
    params: tuple[tuple[str, tuple[tuple[Placement, float], ...]], ...]
    """By parameter: every placement it may live in."""


def make_block(problem: Problem) -> Block:
    """Prepare a problem to be solved at several prices."""
    return Block(problem=problem, facts=value_facts(problem))


def solve_block(
    problem: Problem, prices: Prices, fixed: Fixed | None = None, time_limit_s: float = 10.0
) -> BlockSolution:
    """Best choice for one class. ``fixed`` pins parameters, by value name, to one of their sources.

    Deterministic: same problem, same choice. No answer is a state of the solution, never an exception. The time limit
    is that of the ILP; elimination takes milliseconds.
    """
    return solve(make_block(problem), prices, fixed, time_limit_s=time_limit_s)


def solve(
    block: Block,
    prices: Prices,
    fixed: Fixed | None = None,
    *,
    limits: Limits = LIMITS,
    time_limit_s: float = 10.0,
) -> BlockSolution:
    """As ``solve_block``, of a problem that was prepared."""
    start, fixed = time.monotonic(), fixed or {}
    # what is kept for backward only adds tables, so the width without it decides most cases
    if block.width <= limits.direct and block.network(prices).plan.largest <= limits.direct:
        return _eliminate(block.network(prices), prices, fixed, start)
    relaxed = block.network(prices, relaxed=True)
    if relaxed.plan.largest > limits.most:
        return solve_ilp(block.problem, prices, fixed, time_limit_s)
    bounds = bound(relaxed, prices, fixed, block.shares[-1] if block.shares else None)
    block.shares.append(bounds.shares)
    if bounds.is_proven:
        seconds = time.monotonic() - start
        return BlockSolution(state=SolveState.OPTIMAL, choice=bounds.best, objective=bounds.most_us, seconds=seconds)
    narrowed = narrow(bounds)
    network = make_block(narrowed.problem).network(prices)
    if network.plan.largest <= limits.most:
        found = _eliminate(network, prices, fixed, start)
    else:
        found = solve_ilp(narrowed.problem, prices, fixed, time_limit_s)
    return replace(found, choice=None if found.choice is None else narrowed.original(found.choice))


def _eliminate(network: Network, prices: Prices, fixed: Fixed, start: float) -> BlockSolution:
    found = minimise(network.plan, tables_at(network, prices, fixed))
    assert math.isfinite(found.cost), "every node has a candidate and every move a price"
    return BlockSolution(
        state=SolveState.OPTIMAL,
        choice=choice_of(network, found),
        objective=found.cost / UNITS_PER_US,
        seconds=time.monotonic() - start,
    )


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


def alternatives(
    problem: Problem, prices: Prices, fixed: Fixed | None = None, *, limits: Limits = LIMITS
) -> Alternatives:
    """What each single choice costs at best, the others free: the price of every candidate and every placement.

    Milliseconds where elimination needs no large table; otherwise one solve per choice.
    """
    block, fixed = make_block(problem), fixed or {}
    if block.network(prices).plan.largest > limits.most:
        return _one_by_one(problem, prices, fixed, limits)
    network = block.network(prices)
    costs = min_marginals(network.plan, tables_at(network, prices, fixed))
    nodes = (_priced(n.candidates, costs[i]) for i, n in enumerate(problem.nodes))
    sources = {v.name: v.sources for v in problem.values if v.origin == "param"}
    params = ((name, _priced(sources[name], costs[len(problem.nodes) + i])) for i, name in enumerate(network.params))
    return Alternatives(nodes=tuple(nodes), params=tuple(params))


def _priced(choices: tuple[_Choice, ...], costs: Costs) -> tuple[tuple[_Choice, float], ...]:
    return tuple((choice, float(cost) / UNITS_PER_US) for choice, cost in zip(choices, costs, strict=True))


def _one_by_one(problem: Problem, prices: Prices, fixed: Fixed, limits: Limits) -> Alternatives:
    def with_node(index: int, candidate: Candidate) -> float:
        nodes = list(problem.nodes)
        nodes[index] = replace(nodes[index], candidates=(candidate,))
        return solve(make_block(replace(problem, nodes=tuple(nodes))), prices, fixed, limits=limits).objective

    def with_param(name: str, placement: Placement) -> float:
        if fixed.get(name, placement) != placement:
            return math.inf
        return solve(make_block(problem), prices, {**fixed, name: placement}, limits=limits).objective

    return Alternatives(
        nodes=tuple(tuple((c, with_node(i, c)) for c in node.candidates) for i, node in enumerate(problem.nodes)),
        params=tuple(
            (v.name, tuple((place, with_param(v.name, place)) for place in v.sources))
            for v in problem.values
            if v.origin == "param"
        ),
    )
