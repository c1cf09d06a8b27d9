"""Exact minimum of a sum of small tables over discrete variables, by eliminating one variable after another.

A *table* gives a cost for every combination of the variables in its scope. Eliminating a variable replaces all tables
that know it by one over their other variables: the least cost over its states. What is left at the end is the minimum,
and walking back through the tables of the best states gives the states themselves (bucket elimination: Dechter,
"Bucket elimination: a unifying framework for reasoning", 1999). A second walk back gives, for every state of every
variable, the least cost of any answer that takes it.

Costs are whole numbers held in float64, exact below 2**53, so sums do not depend on the order of addition and equal
answers are equal. Of equal states the first wins. Infinity forbids.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Scope = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The elimination of one variable."""

    variable: int
    scope: Scope
    """Of the sum of its tables; the variable is the first axis."""
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    """Numbers of the tables that are summed, and their shapes with a 1 for each variable they do not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """The order of elimination for tables of given scopes: made once, run with as many costs as wanted."""

    sizes: tuple[int, ...]
    """States of each variable."""
    transposes: tuple[tuple[int, ...], ...]
    """Axes of each given table in the order in which the steps want them."""
    steps: tuple[_Step, ...]
    """Step i writes table ``len(transposes) + i``."""
    largest: int
    """Entries of the largest table on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """The least sum and the first states that reach it."""

    cost: float
    """Infinite when every answer is forbidden."""
    states: tuple[int, ...]


def plan_elimination(sizes: Sequence[int], scopes: Sequence[Scope]) -> Elimination:
    """Fix the order: always the variable whose elimination makes the smallest table, of equal ones the first."""
    order = _order(sizes, scopes)
    when = {variable: i for i, variable in enumerate(order)}
    known = [tuple(sorted(scope, key=when.__getitem__)) for scope in scopes]
    transposes = tuple(tuple(map(old.index, new)) for old, new in zip(scopes, known, strict=True))
    waiting: list[list[int]] = [[] for _ in sizes]
    for number, scope in enumerate(known):
        waiting[scope[0]].append(number)
    steps = []
    for variable in order:
        mine = waiting[variable]
        scope = tuple(sorted({v for i in mine for v in known[i]} | {variable}, key=when.__getitem__))
        shapes = (tuple(sizes[v] if v in known[i] else 1 for v in scope) for i in mine)
        steps.append(_Step(variable=variable, scope=scope, inputs=tuple(zip(mine, shapes, strict=True))))
        known.append(scope[1:])
        if len(scope) > 1:
            waiting[scope[1]].append(len(known) - 1)
    largest = max((math.prod(sizes[v] for v in step.scope) for step in steps), default=0)
    return Elimination(sizes=tuple(sizes), transposes=transposes, steps=tuple(steps), largest=largest)


def _order(sizes: Sequence[int], scopes: Sequence[Scope]) -> list[int]:
    near: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for variable in scope:
            near[variable].update(scope)
    for variable, others in enumerate(near):
        others.discard(variable)
    entries = {v: sizes[v] * math.prod(sizes[n] for n in near[v]) for v in range(len(sizes))}
    order = []
    while entries:
        variable = min(entries, key=entries.__getitem__)
        del entries[variable]
        order.append(variable)
        for other in near[variable]:
            near[other] |= near[variable]
            near[other] -= {variable, other}
            entries[other] = sizes[other] * math.prod(sizes[n] for n in near[other])
    return order


def minimise(plan: Elimination, tables: Sequence[Costs]) -> Minimum:
    """The least sum of the tables, which have the scopes the plan was made for."""
    made = _given(plan, tables)
    total = 0.0
    for step in plan.steps:
        least = _sum(plan, made, step).min(axis=0)
        made.append(least)
        if len(step.scope) == 1:
            total += float(least)
    states = [0] * len(plan.sizes)
    for step in reversed(plan.steps):
        states[step.variable] = _first_best(plan, made, step, states)
    return Minimum(cost=total, states=tuple(states))


def _first_best(plan: Elimination, made: list[Costs], step: _Step, states: Sequence[int]) -> int:
    """The first best state of a variable, given those of the variables that are eliminated after it."""
    later = [states[v] for v in step.scope[1:]]
    costs = np.zeros(plan.sizes[step.variable])
    for number, shape in step.inputs:
        known = (state if size > 1 else 0 for state, size in zip(later, shape[1:], strict=True))
        row: tuple[int | slice, ...] = (slice(None), *known)
        costs = costs + made[number].reshape(shape)[row]
    return int(costs.argmin())


def min_marginals(plan: Elimination, tables: Sequence[Costs]) -> tuple[Costs, ...]:
    """For each variable and each of its states, the least sum of any answer that takes this state."""
    made = _given(plan, tables)
    first = len(made)
    sums = []
    for step in plan.steps:
        sums.append(_sum(plan, made, step))
        made.append(sums[-1].min(axis=0))
    roots = [float(made[first + i]) for i, step in enumerate(plan.steps) if len(step.scope) == 1]
    found: list[Costs] = [np.zeros(size) for size in plan.sizes]
    rest: dict[int, Costs] = {}
    """Of a table that a step wrote: the least sum of everything else, trees of other roots apart."""
    for i in reversed(range(len(plan.steps))):
        step = plan.steps[i]
        costs = sums[i] + rest[first + i] if first + i in rest else sums[i]
        found[step.variable] = costs.min(axis=tuple(range(1, costs.ndim)))
        for number, shape in step.inputs:
            if number >= first:
                absent = tuple(axis for axis, size in enumerate(shape) if size == 1)
                mine = made[number]
                within = costs.min(axis=absent).reshape(mine.shape)
                rest[number] = np.subtract(within, mine, out=np.zeros_like(mine), where=np.isfinite(mine))
    total = sum(roots)
    return tuple(costs + (total - costs.min()) if math.isfinite(total) else costs + total for costs in found)


def _given(plan: Elimination, tables: Sequence[Costs]) -> list[Costs]:
    return [table.transpose(axes) for table, axes in zip(tables, plan.transposes, strict=True)]


def _sum(plan: Elimination, made: list[Costs], step: _Step) -> Costs:
    if not step.inputs:
        return np.zeros(plan.sizes[step.variable])
    (first, shape), *others = step.inputs
    total = made[first].reshape(shape)
    for number, shape in others:
        total = total + made[number].reshape(shape)
    return total
