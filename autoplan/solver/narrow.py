"""A problem without the candidates and placements that are in no best answer: what is left needs smaller tables.

A relaxed network bounds from below every answer that makes one given choice; its own best answers, priced for real,
bound the optimum from above. A choice whose lower bound is above that is left out. So the optimum stays, and every
answer as good. The shares of the relaxed network are improved first; where the two bounds meet, nothing is left to do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoplan.sharding import Placement
from autoplan.solver.choice import TIE_BREAK_US, Choice, objective, resolve
from autoplan.solver.eliminate import Costs, Minimum, min_marginals, minimise
from autoplan.solver.network import UNITS_PER_US, Network, choice_of, tables_at
from autoplan.solver.problem import Prices, Problem, ValueProblem
from autoplan.solver.shares import Shares, projected

_SLACK_US = 1e-3
"""More than what rounding to whole units can add up to."""
_EQUAL_US = TIE_BREAK_US / 4
"""Less than what tells two answers apart, and more than rounding."""
_PROGRESS, _IDLE_STEPS = 0.9, 4
"""Shares are improved until so many steps in a row leave more than this part of the gap: most problems need three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowed:
    """A problem with fewer choices."""

    problem: Problem
    candidates: tuple[tuple[int, ...], ...]
    """By node: the numbers that its candidates had."""

    def original(self, choice: Choice) -> Choice:
        """The same choice for the problem as it was."""
        numbers = (kept[index] for kept, index in zip(self.candidates, choice.candidates, strict=True))
        return Choice(candidates=tuple(numbers), params=choice.params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a relaxed network says of the best answer at one set of prices; us, tie-break included."""

    relaxed: Network
    tables: tuple[Costs, ...] = field(repr=False)
    """At the shares that bound best."""
    shares: tuple[Shares, ...] = field(repr=False)
    least_us: float
    """No answer costs less."""
    best: Choice
    """The best answer that was met on the way."""
    most_us: float
    """What it costs."""

    @property
    def gap_us(self) -> float:
        """What is left open."""
        return self.most_us - self.least_us

    @property
    def is_proven(self) -> bool:
        """Whether no answer is better by what tells two answers apart."""
        return self.gap_us <= _EQUAL_US


def bound(
    relaxed: Network, prices: Prices, fixed: Mapping[str, Placement], shares: Sequence[Shares] | None = None
) -> Bounds:
    """Bound the best answer from both sides, with better and better shares in the relaxed network.

    ``shares`` are those to start from: what was good at other prices; equal ones without them.
    """
    shares = [shared.equal() for shared in relaxed.shared] if shares is None else shares
    tables = _with_shares(relaxed, tables_at(relaxed, prices, fixed), shares)
    found = minimise(relaxed.plan, tables)
    bounds = _bounds(relaxed, tables, shares, found, prices)
    idle = 0
    while not bounds.is_proven and idle < _IDLE_STEPS:
        slopes = [shared.slope(found.states) for shared in relaxed.shared]
        steepness = sum(float((slope * slope).sum()) for slope in slopes)
        if not steepness:
            break
        length = (bounds.most_us * UNITS_PER_US - found.cost) / steepness
        shares = [projected(before + length * slope) for before, slope in zip(shares, slopes, strict=True)]
        tables = _with_shares(relaxed, tables, shares)
        found = minimise(relaxed.plan, tables)
        closer = _better(bounds, _bounds(relaxed, tables, shares, found, prices))
        idle = 0 if closer.gap_us < _PROGRESS * bounds.gap_us else idle + 1
        bounds = closer
    return bounds


def _bounds(relaxed: Network, tables: list[Costs], shares: Sequence[Shares], found: Minimum, prices: Prices) -> Bounds:
    choice = choice_of(relaxed, found)
    resolved = resolve(relaxed.problem, choice)
    return Bounds(
        relaxed=relaxed,
        tables=tuple(tables),
        shares=tuple(shares),
        least_us=found.cost / UNITS_PER_US,
        best=choice,
        most_us=objective(resolved, prices) + TIE_BREAK_US * len(resolved.moves),
    )


def _better(one: Bounds, other: Bounds) -> Bounds:
    """The better of both sides; of equal ones the first."""
    below, above = max(one, other, key=lambda b: b.least_us), min(one, other, key=lambda b: b.most_us)
    return replace(below, best=above.best, most_us=above.most_us)


def _with_shares(relaxed: Network, tables: list[Costs], all_shares: Iterable[Shares]) -> list[Costs]:
    changed = list(tables)
    for shared, shares in zip(relaxed.shared, all_shares, strict=True):
        for number, costs in zip(shared.tables, shared.costs(shares), strict=True):
            changed[number] = np.broadcast_to(costs.squeeze(), tables[number].shape)
    return changed


def narrow(bounds: Bounds) -> Narrowed:
    """Leave out what the relaxed network proves to be in no best answer."""
    relaxed = bounds.relaxed
    problem = relaxed.problem
    marginals = min_marginals(relaxed.plan, bounds.tables)[: len(problem.nodes) + len(relaxed.params)]
    kept = [_within(costs, bounds.most_us + _SLACK_US) for costs in marginals]
    nodes = tuple(
        replace(node, candidates=tuple(node.candidates[i] for i in numbers))
        for node, numbers in zip(problem.nodes, kept, strict=False)
    )
    sources = dict(zip(relaxed.params, kept[len(problem.nodes) :], strict=True))
    values = tuple(_only(v, sources[v.name]) if v.name in sources else v for v in problem.values)
    return Narrowed(problem=replace(problem, nodes=nodes, values=values), candidates=tuple(kept[: len(problem.nodes)]))


def _within(costs: Costs, most_us: float) -> tuple[int, ...]:
    return tuple(i for i, cost in enumerate(costs) if cost <= most_us * UNITS_PER_US)


def _only(value: ValueProblem, numbers: Sequence[int]) -> ValueProblem:
    return replace(
        value,
        sources=tuple(value.sources[i] for i in numbers),
        sync_us=tuple(value.sync_us[i] for i in numbers),
    )
