"""What a user pins, forbids or keeps whole, as data, and what it does to classes, problems and points of level 0.

``constraints_text.parse_constraints`` reads the flags against a model. On the tensor axis a pin or a forbid leaves
fewer placements to a parameter, a kept module leaves its ops one strategy and its parameters no ``Shard``. An axis of
one splits nothing, so nothing changes there; ``allows`` is what leaves out ``tp=1`` where a pin wants a split.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from autoplan.errors import InputError
from autoplan.ir import OpNode, Segment, SegmentedGraph
from autoplan.plan.plan import DATA_MODES, RECOMPUTE, SCHEDULES
from autoplan.sharding import REPLICATE, Placement, Shard, Strategy
from autoplan.solver.problem import NodeProblem, Problem, ValueProblem, make_problem

CHOICES: Mapping[str, tuple[str, ...]] = {
    "pp": (), "dp": (), "cp": (), "tp": (), "ep": (), "microbatch": (), "recompute": RECOMPUTE, "data": DATA_MODES,
    "shards": (), "schedule": SCHEDULES, "chunks": (), "offload": ("false", "true"),
}  # fmt: skip
"""What ``forbid NAME=VALUE`` may name, with its values; none where the value is a whole number from 1."""
Value = int | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A wish as the user wrote it."""

    name: Literal["pin", "forbid", "keep"]
    text: str

    def __str__(self) -> str:
        """Print as ``pin 'head.weight=tp:Shard(0)'``."""
        return f"{self.name} {self.text!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A placement on the tensor axis that a parameter must have, or must not have."""

    flag: Flag
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """A value of a choice of level 0, or of ``recompute``, that may not be."""

    flag: Flag
    name: str
    value: Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Everything a user asks for beyond the degrees. Parameters go by value name (``param:...``), ops by node name."""

    required: Mapping[str, Wish] = field(default_factory=dict)
    forbidden: Mapping[str, tuple[Wish, ...]] = field(default_factory=dict)
    whole: Mapping[str, Flag] = field(default_factory=dict)
    """Parameters of kept modules."""
    kept: Mapping[str, Flag] = field(default_factory=dict)
    """Ops of kept modules."""
    bans: tuple[Ban, ...] = ()
    split_by: Flag | None = None
    """The first pin that asks for a split, and so for a tensor axis of more than one."""

    def flags_on(self, value: str) -> tuple[Flag, ...]:
        """The flags that speak of a parameter."""
        found = [self.required[value].flag] if value in self.required else []
        found += [wish.flag for wish in self.forbidden.get(value, ())]
        found += [self.whole[value]] if value in self.whole else []
        return tuple(dict.fromkeys(found))

    def permits(self, value: str, placement: Placement) -> bool:
        """Whether a parameter may live so."""
        if value in self.required and placement != self.required[value].placement:
            return False
        if value in self.whole and isinstance(placement, Shard):
            return False
        return all(placement != wish.placement for wish in self.forbidden.get(value, ()))


def allows(constraints: Constraints, **values: Value) -> str:
    """Empty when a point with these values (``pp=2, schedule="zbv"``) may be, else the flag that excludes it."""
    assert values.keys() <= CHOICES.keys(), f"{sorted(values)} are not all choices of level 0"
    for ban in constraints.bans:
        if ban.name in values and values[ban.name] == ban.value:
            return str(ban.flag)
    if values.get("tp") == 1 and constraints.split_by is not None:
        return str(constraints.split_by)
    return ""


def refine_classes(sg: SegmentedGraph, constraints: Constraints) -> SegmentedGraph:
    """Divide classes so that all segments of a class have equal constraints; the chain and its segments stay.

    The first part of a class keeps its name, the others are ``block.2``, ``block.3``.
    """
    kinds: dict[tuple[int, object], int] = {}
    found = [kinds.setdefault((s.kind, _demands(s, constraints)), len(kinds)) for s in sg.segments]
    if len(kinds) == len(sg.kind_names):
        return sg
    segments = tuple(replace(segment, kind=kind) for segment, kind in zip(sg.segments, found, strict=True))
    return replace(sg, segments=segments, kind_names=_names(sg, [old for old, _ in kinds]))


def _demands(segment: Segment, constraints: Constraints) -> tuple[object, ...]:
    """What is asked of a segment, position by position; which flag asks is of no matter."""
    params = tuple(
        (
            constraints.required[name].placement if name in constraints.required else None,
            frozenset(wish.placement for wish in constraints.forbidden.get(name, ())),
            name in constraints.whole,
        )
        for name in segment.params
    )
    return params, tuple(name in constraints.kept for name in segment.nodes)


def _names(sg: SegmentedGraph, old_kinds: list[int]) -> tuple[str, ...]:
    names: list[str] = []
    for index, kind in enumerate(old_kinds):
        name, number = sg.kind_names[kind], old_kinds[:index].count(kind) + 1
        wanted = name if number == 1 else f"{name}.{number}"
        while number > 1 and (wanted in sg.kind_names or wanted in names):
            number += 1
            wanted = f"{name}.{number}"
        names.append(wanted)
    return tuple(names)


def constrain(
    problem: Problem, segment: Segment, nodes: Mapping[str, OpNode], constraints: Constraints
) -> Problem:  # fmt: skip
    """The problem of a class without what the constraints exclude; the same one where they say nothing.

    ``segment`` is the first of its class, ``nodes`` are the graph's by name. Raises InputError naming flag, op, degree
    and what is possible there when a parameter or an op is left without a choice.
    """
    touched = any(map(constraints.flags_on, segment.params)) or any(name in constraints.kept for name in segment.nodes)
    if problem.degree == 1 or not touched:
        return problem
    left = tuple(_constrained_node(node, problem, nodes, constraints) for node in problem.nodes)
    values = tuple(_constrained_value(value, problem, nodes, constraints) for value in problem.values)
    return make_problem(left, values, problem.outputs, problem.moves.axis)


def _constrained_node(
    node: NodeProblem, problem: Problem, nodes: Mapping[str, OpNode], constraints: Constraints
) -> NodeProblem:
    if node.name not in constraints.kept:
        return node
    left = tuple(candidate for candidate in node.candidates if is_whole(candidate.strategy))
    if not left:
        ways = "; ".join(str(candidate.strategy) for candidate in node.candidates)
        raise InputError(
            f"{constraints.kept[node.name]} cannot be at tp={problem.degree}: {nodes[node.name].where} has no way to "
            f"run whole there, only {ways}. Leave the op out of what is kept, or tp={problem.degree} out of the search"
        )
    return replace(node, candidates=left)


def is_whole(strategy: Strategy) -> bool:
    """Whether every rank does all of the op."""
    return all(placement == REPLICATE for placement in (*strategy.inputs, *strategy.outputs))


def _constrained_value(
    value: ValueProblem, problem: Problem, nodes: Mapping[str, OpNode], constraints: Constraints
) -> ValueProblem:
    flags = constraints.flags_on(value.name)
    if not flags:
        return value
    priced = zip(value.sources, value.sync_us, strict=True)
    left = [(source, sync) for source, sync in priced if constraints.permits(value.name, source)]
    if not left:
        reader = next(node.name for node in problem.nodes if value.name in node.operands)
        raise InputError(
            f"{' with '.join(map(str, flags))} cannot be at tp={problem.degree}: {value.name.removeprefix('param:')} "
            f"{value.meta} is read by {nodes[reader].where} and can be {', '.join(map(str, value.sources))} there. "
            f"Change the flag, or leave tp={problem.degree} out of the search"
        )
    return replace(value, sources=tuple(s for s, _ in left), sync_us=tuple(us for _, us in left))
