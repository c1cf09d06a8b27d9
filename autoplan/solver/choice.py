"""What a choice for one class of segments does and costs: the moves that run, the storages that stay.

This is what ``block.py`` minimises, written without a solver; its optimum equals ``objective`` here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoplan.sharding import Placement
from autoplan.solver.milp import SolveState
from autoplan.solver.problem import (
    Candidate,
    Move,
    MoveKey,
    NodeProblem,
    Prices,
    Problem,
    Storage,
    ValueProblem,
    local_bytes,
)

TIE_BREAK_US = 1e-4
"""Per move, so that of two equal plans the one with fewer changes of placement wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A candidate index per node, in the order of the problem, and a placement per parameter."""

    candidates: tuple[int, ...]
    params: tuple[tuple[str, Placement], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSolution:
    """The end of one solve; ``choice`` is there when the state is OPTIMAL or FEASIBLE."""

    state: SolveState
    choice: Choice | None
    objective: float
    """Tie-break included; infinite without a choice."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A choice with everything that follows from it."""

    problem: Problem
    nodes: tuple[tuple[NodeProblem, Candidate], ...]
    sources: Mapping[str, Placement]
    """How each value is made or arrives."""
    moves: tuple[MoveKey, ...]
    """Changes of placement that run, each once a microbatch."""

    def move(self, key: MoveKey) -> Move:
        """Price of a move that runs."""
        return self.problem.moves[key]


def resolve(problem: Problem, choice: Choice) -> Resolved:
    """Work out sources and moves of a choice."""
    nodes = tuple((n, n.candidates[i]) for n, i in zip(problem.nodes, choice.candidates, strict=True))
    sources = {v.name: v.sources[0] for v in problem.values if v.origin in ("input", "given")}
    sources |= dict(choice.params)
    for node, candidate in nodes:
        sources |= dict(zip(node.results, candidate.strategy.outputs, strict=True))
    wanted: dict[Storage, None] = {}
    for node, candidate in nodes:
        wanted |= dict.fromkeys(zip(node.operands, candidate.strategy.inputs, strict=True))
    wanted |= dict.fromkeys((name, dst) for name, dst in problem.outputs if dst is not None)
    moves = tuple((name, sources[name], dst) for name, dst in wanted if sources[name] != dst)
    return Resolved(problem=problem, nodes=nodes, sources=sources, moves=moves)


def time_us(resolved: Resolved) -> float:
    """Forward and backward of one microbatch, communication included."""
    compute = sum(candidate.total_us for _, candidate in resolved.nodes)
    return compute + sum(resolved.move(key).total_us for key in resolved.moves)


def sync_us(resolved: Resolved) -> float:
    """What the gradients of the parameters cost once a step on this axis."""
    return sum(
        value.sync_us[value.sources.index(resolved.sources[value.name])]
        for value in resolved.problem.values
        if value.origin == "param"
    )


def state_bytes(resolved: Resolved) -> int:
    """Bytes of the parameters on one device."""
    degree = resolved.problem.degree
    return sum(
        local_bytes(v.meta, resolved.sources[v.name], degree) for v in resolved.problem.values if v.origin == "param"
    )


def objective(resolved: Resolved, prices: Prices) -> float:
    """What the solve minimises, tie-break apart."""
    total = time_us(resolved) + prices.step * sync_us(resolved) + prices.state_us_per_byte * state_bytes(resolved)
    price = prices.activation_us_per_byte
    return total + price * activation_bytes(resolved) if price else total


def activation_bytes(resolved: Resolved) -> int:
    """Bytes kept from forward to backward when nothing is recomputed."""
    extra = sum(candidate.extra_bytes for _, candidate in resolved.nodes)
    return extra + kept_bytes(resolved, saved_storages(resolved))


def saved_storages(resolved: Resolved) -> list[Storage]:
    """What the ops keep for their backward passes, repeats included."""
    return [storage for _, candidate in resolved.nodes for storage in candidate.saved]


def kept_bytes(resolved: Resolved, kept: Iterable[Storage]) -> int:
    """Bytes that stay alive when the given storages are kept. A view keeps its base; each storage counts once.

    Parameters and values from the prelude live anyway and count nothing; their redistributed copies do count.
    """
    values = {v.name: v for v in resolved.problem.values}
    bases = base_storages(resolved, kept)
    return sum(local_bytes(values[name].meta, place, resolved.problem.degree) for name, place in bases)


def base_storages(resolved: Resolved, kept: Iterable[Storage]) -> set[Storage]:
    """The memory behind the given storages: each a fresh copy or a value as it was made."""
    values = {v.name: v for v in resolved.problem.values}
    views = {result: (n, c) for n, c in resolved.nodes if n.is_view for result in n.results}
    found: set[Storage] = set()
    for name, place in kept:
        base = _base(resolved, values, views, name, place)
        if base is not None:
            found.add(base)
    return found


def _base(
    resolved: Resolved,
    values: Mapping[str, ValueProblem],
    views: Mapping[str, tuple[NodeProblem, Candidate]],
    name: str,
    place: Placement,
) -> Storage | None:
    while True:
        source = resolved.sources[name]
        if source != place and resolved.problem.moves[name, source, place].copies:
            return name, place
        if name not in views:
            return (name, source) if values[name].origin in ("node", "input") else None
        node, candidate = views[name]
        name, place = node.operands[0], candidate.strategy.inputs[0]
