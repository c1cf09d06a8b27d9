"""What each class of segments can cost, solved once per (tensor degree, microbatch size, boundary) and kept.

The prices of the ILP sweep from "time alone" to "parameters are dear"; each distinct answer is a *variant* of the
class. A variant x a way to recompute is an *option*. Level 2 chooses an option per segment.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoplan.cluster import Cluster, Group
from autoplan.cost import Collective, CostModel
from autoplan.errors import InfeasibleError
from autoplan.ir import SegmentedGraph
from autoplan.plan.plan import RECOMPUTE, LayoutCost, Recompute
from autoplan.sharding import CollectiveKind, Placement
from autoplan.solver.batch import BatchSplit
from autoplan.solver.block import solve_block
from autoplan.solver.build import Model, build_problem, make_model
from autoplan.solver.choice import Choice, Resolved, resolve
from autoplan.solver.milp import SolveState
from autoplan.solver.options import largest_buffer_bytes, layout_cost
from autoplan.solver.problem import Axis, Prices, Problem

Fixed = dict[str, Placement]
Slot = tuple[int, str]
"""A class and the name of one of its parameters in the first segment of the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run the segments of a class."""

    name: str
    kind: int
    recompute: Recompute
    resolved: Resolved = field(repr=False)
    cost: LayoutCost
    buffer_bytes: int
    """Largest collective inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The options of every class, at one tensor degree, microbatch size and boundary."""

    options: tuple[tuple[Option, ...], ...]
    """By class."""
    states: frozenset[SolveState]
    """How the ILPs behind it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Makes tables on demand and keeps them with the inputs they follow from."""

    sg: SegmentedGraph
    split: BatchSplit
    cluster: Cluster
    cost: CostModel
    recompute: Recompute | None
    models: dict[int, Model] = field(default_factory=dict, repr=False)
    made: dict[tuple[int, int, bool], Table] = field(default_factory=dict, repr=False)

    def model(self, microbatch: int) -> Model:
        """The model with the shapes of one microbatch of that many samples."""
        if microbatch not in self.models:
            parts = self.sg.graph.batch_size // microbatch
            self.models[microbatch] = make_model(self.sg, self.split, parts)
        return self.models[microbatch]

    def table(self, tp: int, microbatch: int, sequence: bool) -> Table:
        """Options of every class; ``sequence`` splits what crosses between segments along dim 1."""
        key = tp, microbatch, sequence
        if key not in self.made:
            self.made[key] = self._make(tp, microbatch, sequence)
        return self.made[key]

    def problems(self, tp: int, microbatch: int, sequence: bool) -> tuple[Problem, ...]:
        """The problem of every class."""
        axis = Axis(group=Group(size=tp, per_node=min(tp, self.cluster.devices_per_node)), cost=self.cost)
        model = self.model(microbatch)
        kinds = range(len(self.sg.kind_names))
        return tuple(build_problem(model, self.sg.representative(kind), axis, sequence) for kind in kinds)

    def _make(self, tp: int, microbatch: int, sequence: bool) -> Table:
        problems = self.problems(tp, microbatch, sequence)
        prices = sweep(self.cluster, self.cost, tp)
        fixed = fix_shared(self.sg, problems, prices[-1])
        states: set[SolveState] = set()
        options = []
        for kind, problem in enumerate(problems):
            variants = solve_variants(problem, prices, fixed[kind], states)
            options.append(self._options(kind, variants))
        return Table(options=tuple(options), states=frozenset(states))

    def _options(self, kind: int, variants: tuple[Resolved, ...]) -> tuple[Option, ...]:
        wanted = RECOMPUTE if self.recompute is None else (self.recompute,)
        return tuple(
            Option(
                name=f"{self.sg.kind_names[kind]}.{'abcdefgh'[index]}.{recompute}",
                kind=kind,
                recompute=recompute,
                resolved=variant,
                cost=layout_cost(variant, recompute),
                buffer_bytes=largest_buffer_bytes(variant),
            )
            for index, variant in enumerate(variants)
            for recompute in wanted
        )


def sweep(cluster: Cluster, cost: CostModel, tp: int) -> tuple[Prices, ...]:
    """Prices to solve each class at: time alone, and parameters at what moving them over all other devices costs."""
    others = max(2, cluster.num_devices // tp)
    group = Group(size=others, per_node=max(1, min(others, cluster.devices_per_node // tp)))
    probe = Collective(kind=CollectiveKind.ALL_REDUCE, num_bytes=2**28, group=group)
    return Prices(step=1 / 16), Prices(step=1.0, state_us_per_byte=cost.collective_us(probe) / probe.num_bytes)


def solve_variants(
    problem: Problem, prices: tuple[Prices, ...], fixed: Mapping[str, Placement], states: set[SolveState]
) -> tuple[Resolved, ...]:
    """The distinct answers over a sweep of prices; ``states`` collects how the solves ended."""
    if problem.degree == 1:
        return (resolve(problem, trivial_choice(problem)),)
    found: dict[Choice, None] = {}
    for price in prices:
        solution = solve_block(problem, price, fixed)
        states.add(solution.state)
        if solution.choice is None:
            raise InfeasibleError(
                f"no placements were found for a class of segments ({solution.state.value}): raise the time limit, or "
                "pin tp=1"
            )
        found[solution.choice] = None
    return tuple(resolve(problem, choice) for choice in found)


def trivial_choice(problem: Problem) -> Choice:
    """The only choice on an axis of one."""
    params = tuple((v.name, v.sources[0]) for v in problem.values if v.origin == "param")
    return Choice(candidates=(0,) * len(problem.nodes), params=params)


def shared_slots(sg: SegmentedGraph) -> tuple[tuple[Slot, ...], ...]:
    """Parameters that must have one placement although several segments read them, as groups of slots."""
    first = [sg.representative(kind).params for kind in range(len(sg.kind_names))]
    slots: dict[str, set[Slot]] = {}
    for segment in sg.segments:
        for position, name in enumerate(segment.params):
            slots.setdefault(name, set()).add((segment.kind, first[segment.kind][position]))
    groups: list[set[Slot]] = []
    for name in shared_params(sg):
        touching = [g for g in groups if g & slots[name]]
        groups = [g for g in groups if not g & slots[name]] + [slots[name].union(*touching)]
    return tuple(tuple(sorted(group)) for group in groups)


def shared_params(sg: SegmentedGraph) -> tuple[str, ...]:
    """Values of the parameters that more than one segment reads, in order of first use."""
    reads = Counter(name for segment in sg.segments for name in segment.params)
    return tuple(name for name, count in reads.items() if count > 1)


def fix_shared(sg: SegmentedGraph, problems: tuple[Problem, ...], prices: Prices) -> tuple[Fixed, ...]:
    """Best joint placement of parameters that several classes read: every one is tried, classes weighted by use.

    With several such parameters each is settled in turn, the earlier ones fixed.
    """
    fixed: tuple[Fixed, ...] = tuple({} for _ in problems)
    if problems[0].degree == 1:
        return fixed
    uses = [sum(segment.kind == kind for segment in sg.segments) for kind in range(len(problems))]
    for group in shared_slots(sg):
        best = min(
            _placements(problems, group), key=lambda place: _joint_cost(problems, uses, fixed, group, place, prices)
        )
        for kind, name in group:
            fixed[kind][name] = best
    return fixed


def _placements(problems: tuple[Problem, ...], group: tuple[Slot, ...]) -> list[Placement]:
    sources = [next(v.sources for v in problems[kind].values if v.name == name) for kind, name in group]
    return [place for place in sources[0] if all(place in other for other in sources)]


def _joint_cost(
    problems: tuple[Problem, ...], uses: list[int], fixed: tuple[Fixed, ...], group: tuple[Slot, ...],
    place: Placement, prices: Prices,
) -> float:  # fmt: skip
    total = 0.0
    for kind in sorted({kind for kind, _ in group}):
        pinned = fixed[kind] | {name: place for k, name in group if k == kind}
        total += uses[kind] * solve_block(problems[kind], prices, pinned).objective
    return total
