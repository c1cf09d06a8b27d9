"""One class of segments as an exact ILP over placements, stated in PuLP and solved by HiGHS.

``block.py`` takes this way where elimination would need too large a table; the tests compare the two.

Variables
    x[n, k]        node n uses candidate k; binary, one per node                     (_add_nodes)
    p[v, s]        parameter v lives in placement s; binary, one per parameter       (_add_params)
    y[v, G, d]     value v is moved to placement d from a source in the group G      (_add_moves)
    keep[v, s]     value v is kept for backward as it was made, in s                 (_add_memory)
    fresh[v, d]    the moved copy of v in d is kept for backward                     (_add_memory)
Objective
    time of a microbatch + step weight x gradient sums + price x parameter bytes + price x kept bytes

Sources whose move to d costs the same form one group, so y is shared by every reader that wants d and its price is
what runs. ``choice.objective`` states the same cost without a solver. docs/formulation.md has the mathematics.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import pulp

from autoplan.sharding import Placement
from autoplan.solver.choice import TIE_BREAK_US, BlockSolution, Choice
from autoplan.solver.milp import run_solver
from autoplan.solver.problem import MoveKey, Prices, Problem, Storage, ValueProblem, local_bytes

_ORDER_US = 1e-9
Fixed = Mapping[str, Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Is:
    """A 0/1 statement: the sum of binary variables and a constant. Kept apart from PuLP's expressions for speed."""

    variables: tuple[pulp.LpVariable, ...] = ()
    constant: int = 0

    @property
    def expression(self) -> pulp.LpAffineExpression:
        """As PuLP writes it."""
        return pulp.LpAffineExpression([(v, 1) for v in self.variables], constant=self.constant)


_ALWAYS = _Is(constant=1)
_Wants = dict[Placement, _Is]


@dataclass(slots=True, kw_only=True)
class _Model:
    """The ILP while it is being stated."""

    problem: Problem
    lp: pulp.LpProblem
    cost: list[tuple[pulp.LpVariable, float]] = field(default_factory=list)
    x: list[list[pulp.LpVariable]] = field(default_factory=list)
    params: dict[str, dict[Placement, pulp.LpVariable]] = field(default_factory=dict)
    made: dict[str, dict[Placement, _Is]] = field(default_factory=dict)
    """Value to (source placement to the statement that it is made so)."""
    count: int = 0

    def variable(self, cost: float, *, binary: bool = False) -> pulp.LpVariable:
        """A new variable between 0 and 1 with its share of the objective."""
        self.count += 1
        category = pulp.LpBinary if binary else pulp.LpContinuous
        made = self.lp.add_variable(f"v{self.count}", 0, 1, category)
        self.cost.append((made, cost + _ORDER_US * (self.count % 97) * binary))
        return made

    def equate(self, parts: list[pulp.LpVariable], whole: _Is) -> None:
        """The parts sum to the statement."""
        terms = [(part, 1) for part in parts] + [(variable, -1) for variable in whole.variables]
        self.lp += pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintEQ, rhs=whole.constant)

    def at_least(self, large: pulp.LpVariable, small: pulp.LpVariable) -> None:
        """One variable is at least another."""
        expression = pulp.LpAffineExpression([(large, 1), (small, -1)])
        self.lp += pulp.LpConstraint(expression, pulp.LpConstraintGE, rhs=0)

    def add(self, constraint: pulp.LpConstraint) -> None:
        """One more constraint."""
        self.lp += constraint


def solve_ilp(
    problem: Problem, prices: Prices, fixed: Fixed | None = None, time_limit_s: float = 10.0
) -> BlockSolution:
    """Best choice for one class. ``fixed`` pins parameters, by value name, to one of their sources.

    Deterministic: same problem, same choice. No answer is a state of the solution, never an exception.
    """
    start = time.monotonic()
    model = _Model(problem=problem, lp=pulp.LpProblem("block", pulp.LpMinimize))
    _add_nodes(model, prices)
    _add_values(model, prices, fixed or {})
    _add_moves(model)
    if prices.activation_us_per_byte > 0:
        _add_memory(model, prices.activation_us_per_byte)
    model.lp.setObjective(pulp.LpAffineExpression(model.cost))
    state = run_solver(model.lp, time_limit_s)
    seconds = time.monotonic() - start
    if not state.has_solution:
        return BlockSolution(state=state, choice=None, objective=float("inf"), seconds=seconds)
    objective = float(pulp.value(model.lp.objective))
    return BlockSolution(state=state, choice=_read(model), objective=objective, seconds=seconds)


def _add_nodes(model: _Model, prices: Prices) -> None:
    extra = prices.activation_us_per_byte
    for node in model.problem.nodes:
        row = [model.variable(c.total_us + extra * c.extra_bytes, binary=True) for c in node.candidates]
        model.x.append(row)
        model.equate(row, _ALWAYS)
        for index, result in enumerate(node.results):
            sources = model.made.setdefault(result, {})
            for placement in dict.fromkeys(c.strategy.outputs[index] for c in node.candidates):
                chosen = (
                    v for v, c in zip(row, node.candidates, strict=True) if c.strategy.outputs[index] == placement
                )
                sources[placement] = _Is(variables=tuple(chosen))


def _add_values(model: _Model, prices: Prices, fixed: Fixed) -> None:
    for value in model.problem.values:
        if value.origin == "param":
            _add_param(model, value, prices, fixed.get(value.name))
        elif value.origin != "node":
            model.made[value.name] = {value.sources[0]: _ALWAYS}


def _add_param(model: _Model, value: ValueProblem, prices: Prices, pinned: Placement | None) -> None:
    row = {}
    for source, sync in zip(value.sources, value.sync_us, strict=True):
        if pinned is None or source == pinned:
            state = local_bytes(value.meta, source, model.problem.degree) * prices.state_us_per_byte
            row[source] = model.variable(prices.step * sync + state, binary=True)
    assert row, f"{value.name} cannot live in {pinned}; it can in {', '.join(map(str, value.sources))}"
    model.equate(list(row.values()), _ALWAYS)
    model.params[value.name] = row
    model.made[value.name] = {source: _Is(variables=(variable,)) for source, variable in row.items()}


def _readers(model: _Model) -> dict[str, list[_Wants]]:
    """For each value and each reader: per placement, the statement that the reader wants it so.

    A node that reads a value twice counts as two readers.
    """
    found: dict[str, list[_Wants]] = {}
    for node, row in zip(model.problem.nodes, model.x, strict=True):
        for position, name in enumerate(node.operands):
            mine: dict[Placement, list[pulp.LpVariable]] = {}
            for variable, candidate in zip(row, node.candidates, strict=True):
                mine.setdefault(candidate.strategy.inputs[position], []).append(variable)
            found.setdefault(name, []).append(
                {place: _Is(variables=tuple(found_so)) for place, found_so in mine.items()}
            )
    for name, dst in model.problem.outputs:
        if dst is not None:
            found.setdefault(name, []).append({dst: _ALWAYS})
    return found


def _add_moves(model: _Model) -> None:
    for name, readers in _readers(model).items():
        shared: dict[MoveKey, pulp.LpVariable] = {}
        for wants in readers:
            _add_edge(model, name, wants, shared if len(readers) > 1 else None)


def _add_edge(model: _Model, name: str, wants: _Wants, shared: dict[MoveKey, pulp.LpVariable] | None) -> None:
    """Transport of a value to one reader: what is made is what is sent, what is wanted is what arrives."""
    sources = model.made[name]
    flow: dict[tuple[Placement, Placement], pulp.LpVariable] = {}
    for src in sources:
        for dst in wants:
            move = None if src == dst else model.problem.moves[name, src, dst]
            price = 0.0 if move is None else move.total_us + TIE_BREAK_US
            if move is None or shared is None:
                flow[src, dst] = model.variable(price)
                continue
            flow[src, dst] = model.variable(0.0)
            key = name, src, dst
            if key not in shared:
                shared[key] = model.variable(price)
            model.at_least(shared[key], flow[src, dst])
    for src, made in sources.items():
        model.equate([flow[src, dst] for dst in wants], made)
    for dst, wanted in wants.items():
        model.equate([flow[src, dst] for src in sources], wanted)


def _add_memory(model: _Model, price: float) -> None:
    memory = _Memory(model=model, price=price)
    for node, row in zip(model.problem.nodes, model.x, strict=True):
        mine: dict[Storage, list[pulp.LpVariable]] = {}
        for variable, candidate in zip(row, node.candidates, strict=True):
            for storage in dict.fromkeys(candidate.saved):
                mine.setdefault(storage, []).append(variable)
        for storage, variables in mine.items():
            model.add(memory.held(storage) >= pulp.lpSum(variables))


@dataclass(slots=True, kw_only=True)
class _Memory:
    """Which storages stay alive: ``held`` asks for a placement of a value, ``kept`` for the value as it was made."""

    model: _Model
    price: float
    held_of: dict[Storage, pulp.LpVariable] = field(default_factory=dict)
    kept_of: dict[Storage, pulp.LpVariable] = field(default_factory=dict)

    def held(self, storage: Storage) -> pulp.LpVariable:
        """Variable that is 1 when the value must stay in that placement, with what follows for its memory."""
        if storage not in self.held_of:
            name, dst = storage
            self.held_of[storage] = held = self.model.variable(0.0)
            moves, sources = self.model.problem.moves, self.model.made[name]
            moved = {src: moves[name, src, dst].copies for src in sources if (name, src, dst) in moves}
            copies = [src for src, is_copy in moved.items() if is_copy]
            if copies:
                fresh = self.model.variable(self._cost(name, dst))
                self.model.add(fresh >= held + pulp.lpSum(sources[src].expression for src in copies) - 1)
            for src, made in sources.items():
                if src == dst or moved.get(src) is False:
                    self.model.add(self.kept((name, src)) >= held + made.expression - 1)
        return self.held_of[storage]

    def kept(self, storage: Storage) -> pulp.LpVariable:
        """Variable that is 1 when the value must stay as it was made; a view passes this on to its operand."""
        if storage not in self.kept_of:
            name, src = storage
            value = next(v for v in self.model.problem.values if v.name == name)
            maker = next((i for i, n in enumerate(self.model.problem.nodes) if name in n.results and n.is_view), None)
            counts = maker is None and value.origin in ("node", "input")
            self.kept_of[storage] = kept = self.model.variable(self._cost(name, src) if counts else 0.0)
            if maker is not None:
                self._pass_on(kept, storage, maker)
        return self.kept_of[storage]

    def _pass_on(self, kept: pulp.LpVariable, storage: Storage, maker: int) -> None:
        node = self.model.problem.nodes[maker]
        index = node.results.index(storage[0])
        groups: dict[Placement, list[pulp.LpVariable]] = {}
        for variable, candidate in zip(self.model.x[maker], node.candidates, strict=True):
            if candidate.strategy.outputs[index] == storage[1]:
                groups.setdefault(candidate.strategy.inputs[0], []).append(variable)
        for place, variables in groups.items():
            self.model.add(self.held((node.operands[0], place)) >= kept + pulp.lpSum(variables) - 1)

    def _cost(self, name: str, place: Placement) -> float:
        value = next(v for v in self.model.problem.values if v.name == name)
        return self.price * local_bytes(value.meta, place, self.model.problem.degree)


def _read(model: _Model) -> Choice:
    candidates = tuple(max(range(len(row)), key=lambda k, row=row: row[k].value()) for row in model.x)  # type: ignore[misc]
    params = tuple((name, max(row, key=lambda s, row=row: row[s].value())) for name, row in model.params.items())  # type: ignore[misc]
    return Choice(candidates=candidates, params=params)
