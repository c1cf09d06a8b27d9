"""A problem without the candidates and placements that are in no best answer: what is left needs smaller tables.

A relaxed network bounds from below every answer that makes one given choice; its own best answer, priced for real,
bounds the optimum from above. A choice whose lower bound is above that is left out. So the optimum stays, and every
answer as good.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoplan.sharding import Placement
from autoplan.solver.choice import TIE_BREAK_US, Choice, objective, resolve
from autoplan.solver.eliminate import Costs, min_marginals, minimise
from autoplan.solver.network import UNITS_PER_US, Network, choice_of, tables_at
from autoplan.solver.problem import Prices, Problem, ValueProblem

SLACK_US = 1e-3
"""More than what rounding to whole units can add up to."""


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
    """What a relaxed network says of a problem at one set of prices; us, tie-break included."""

    relaxed: Network
    marginals: tuple[Costs, ...] = field(repr=False)
    """Per node and parameter, for each of its choices: no answer that makes it costs less. Whole units."""
    least_us: float
    most_us: float
    """An answer exists that costs no more."""


def bound(relaxed: Network, prices: Prices, fixed: Mapping[str, Placement]) -> Bounds:
    """Bound every single choice from below, and the optimum from above."""
    problem = relaxed.problem
    tables = tables_at(relaxed, prices, fixed)
    found = minimise(relaxed.plan, tables)
    best = resolve(problem, choice_of(relaxed, found))
    marginals = min_marginals(relaxed.plan, tables)
    return Bounds(
        relaxed=relaxed,
        marginals=marginals[: len(problem.nodes) + len(relaxed.params)],
        least_us=found.cost / UNITS_PER_US,
        most_us=objective(best, prices) + TIE_BREAK_US * len(best.moves) + SLACK_US,
    )


def narrow(bounds: Bounds, most_us: float) -> Narrowed:
    """Leave out what is in no answer of at most this cost. The bound itself keeps at least one answer."""
    relaxed = bounds.relaxed
    problem = relaxed.problem
    kept = [_within(costs, most_us) for costs in bounds.marginals]
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
