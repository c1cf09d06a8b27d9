"""What each class of segments can cost, solved once per (degrees, microbatch size, boundary) and kept.

The prices of the ILP sweep from "time alone" to "memory is dear"; each distinct answer is a *variant* of the class. A
variant x a way to recompute is an *option*. Level 2 chooses an option per segment. With a context axis its split is
settled first (``context.py``), and the tensor axis is solved on what is left of each shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd

from autoplan.cluster import Cluster, Group
from autoplan.cost import Collective, CostModel
from autoplan.errors import InfeasibleError, InputError
from autoplan.ir import OpNode, Segment, SegmentedGraph
from autoplan.plan.plan import RECOMPUTE, LayoutCost, Recompute
from autoplan.sharding import CollectiveKind, Placement, Strategy, local_shape
from autoplan.solver.batch import BatchSplit
from autoplan.solver.block import solve_block, solve_sweep
from autoplan.solver.build import Model, build_problem, make_model
from autoplan.solver.choice import Choice, Resolved, resolve
from autoplan.solver.constraints import Constraints, constrain
from autoplan.solver.context import Context, context_model, make_context
from autoplan.solver.context_cost import context_bytes, context_collectives
from autoplan.solver.experts import dispatch_bytes, expert_nodes, expert_params
from autoplan.solver.milp import SolveState
from autoplan.solver.options import count_collectives, gathered_again, largest_buffer_bytes, layout_costs
from autoplan.solver.problem import Axis, Prices, Problem

Fixed = dict[str, Placement]
Slot = tuple[int, str]
"""A class and the name of one of its parameters in the first segment of the class."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class TableKey:
    """What a table depends on: degrees, where the context axis lies, the microbatch and the boundary."""

    tp: int
    cp: int = 1
    cp_per_node: int = 1
    microbatch: int
    sequence: bool
    """Whether what crosses between segments is split along dim 1 on the tensor axis."""


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
    experts: frozenset[str] = frozenset()
    """Those of its parameters that are weights of experts."""
    dispatch_bytes: int = 0
    """What a rank hands to one all-to-all of its tokens, all expert ops of the segment together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The options of every class, at one key."""

    key: TableKey
    options: tuple[tuple[Option, ...], ...]
    """By class."""
    states: frozenset[SolveState]
    """How the ILPs behind it ended."""
    context: Context | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Makes tables on demand and keeps them with the inputs they follow from."""

    sg: SegmentedGraph
    split: BatchSplit
    cluster: Cluster
    cost: CostModel
    recompute: tuple[Recompute, ...] = RECOMPUTE
    """Ways to recompute that may be chosen."""
    constraints: Constraints = Constraints()
    heads: tuple[int, ...] = ()
    """Query and key heads of every attention op."""
    models: dict[int, Model] = field(default_factory=dict, repr=False)
    contexts: dict[tuple[int, int, int, int], tuple[Context, Model]] = field(default_factory=dict, repr=False)
    axes: dict[int, Axis] = field(default_factory=dict, repr=False)
    sizes: dict[tuple[TableKey, int], tuple[int, tuple[tuple[int, ...], ...]]] = field(default_factory=dict, repr=False)
    """Bytes that segments read from the prelude, and that cross at each position."""
    made: dict[TableKey, Table] = field(default_factory=dict, repr=False)

    def model(self, microbatch: int) -> Model:
        """The model with the shapes of one microbatch of that many samples."""
        if microbatch not in self.models:
            parts = self.sg.graph.batch_size // microbatch
            self.models[microbatch] = make_model(self.sg, self.split, parts)
        return self.models[microbatch]

    def context(self, key: TableKey) -> tuple[Context | None, Model]:
        """The split of the sequence, and the model as one rank of the context axis sees it."""
        model = self.model(key.microbatch)
        if key.cp == 1:
            return None, model
        found = self._context_key(key)
        if found not in self.contexts:
            axis = Axis(group=Group(size=key.cp, per_node=key.cp_per_node), cost=self.cost)
            self.adopt(key, make_context(model, self.split, axis, tensor_degree=found[3]))
        return self.contexts[found]

    def adopt(self, key: TableKey, context: Context) -> None:
        """Use this split of the sequence at a key."""
        self.contexts[self._context_key(key)] = context, context_model(self.model(key.microbatch), context)

    def _context_key(self, key: TableKey) -> tuple[int, int, int, int]:
        return key.cp, key.cp_per_node, key.microbatch, self._most_tensor(key)

    def _most_tensor(self, key: TableKey) -> int:
        """A tensor degree that leaves the context axis the same choice of heads: the largest, or one too many."""
        if not self.heads:
            return 1
        most = gcd(*self.heads) // key.cp if gcd(*self.heads) % key.cp == 0 else 0
        return max(1, most) if most and most % key.tp == 0 else key.tp * max(1, *self.heads)

    def table(self, key: TableKey) -> Table:
        """Options of every class."""
        if key not in self.made:
            self.made[key] = self._make(key)
        return self.made[key]

    def problems(self, key: TableKey) -> tuple[Problem, ...]:
        """The problem of every class on the tensor axis."""
        _, model = self.context(key)
        axis = self.axis(key.tp)
        return tuple(self._problem(model, self.sg.representative(k), axis, key) for k in range(len(self.sg.kind_names)))

    def axis(self, tp: int) -> Axis:
        """The tensor axis of a degree."""
        if tp not in self.axes:
            group = Group(size=tp, per_node=min(tp, self.cluster.devices_per_node))
            self.axes[tp] = Axis(group=group, cost=self.cost)
        return self.axes[tp]

    def _problem(self, model: Model, segment: Segment, axis: Axis, key: TableKey) -> Problem:
        problem = build_problem(model, segment, axis, key.sequence)
        return constrain(problem, segment, model.nodes, self.constraints) if axis.degree > 1 else problem

    def _make(self, key: TableKey) -> Table:
        problems = self.problems(key)
        context, model = self.context(key)
        prices = sweep(self.cluster, self.cost, key.tp)
        fixed = fix_shared(self.sg, problems, prices[1])
        states: set[SolveState] = set()
        options = []
        for kind, problem in enumerate(problems):
            variants = solve_variants(problem, prices, fixed[kind], states)
            options.append(self._options(kind, variants, model, context, key))
        return Table(key=key, options=tuple(options), states=frozenset(states), context=context)

    def _options(
        self, kind: int, variants: tuple[Resolved, ...], model: Model, context: Context | None, key: TableKey
    ) -> tuple[Option, ...]:
        return tuple(
            option
            for index, variant in enumerate(variants)
            for option in self._recomputed(kind, variant, self.recompute, model, context, key, index)
        )

    def option(
        self, kind: int, variant: Resolved, recompute: Recompute, model: Model, context: Context | None,
        key: TableKey, index: int,
    ) -> Option:  # fmt: skip
        """A variant with a way to recompute, priced on all axes of the model."""
        return self._recomputed(kind, variant, (recompute,), model, context, key, index)[0]

    def _recomputed(
        self, kind: int, variant: Resolved, ways: tuple[Recompute, ...], model: Model, context: Context | None,
        key: TableKey, index: int,
    ) -> tuple[Option, ...]:  # fmt: skip
        if "none" in ways and not gathered_again(variant):
            ways = tuple(way for way in ways if way != "gather")
        nodes = expert_nodes(model.nodes[name] for name in self.sg.representative(kind).nodes)
        costs = layout_costs(variant, ways)
        buffers = largest_buffer_bytes(variant)
        if context is not None:
            costs, largest = _with_context(costs, variant, ways, context, kind, key, self.cost)
            buffers = max(buffers, largest)
        chosen = {node.name: candidate.strategy for node, candidate in variant.nodes}
        experts = frozenset(name for node in nodes for name in expert_params(node))
        dispatched = sum(_dispatch(model, node, chosen[node.name], key.tp) for node in nodes)
        return tuple(
            Option(
                name=f"{self.sg.kind_names[kind]}.{_letters(index)}.{recompute}",
                kind=kind,
                recompute=recompute,
                resolved=variant,
                cost=cost,
                buffer_bytes=buffers,
                experts=experts,
                dispatch_bytes=dispatched,
            )
            for recompute, cost in zip(ways, costs, strict=True)
        )


def _letters(index: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    head, tail = divmod(index, 26)
    return (_letters(head - 1) if head else "") + "abcdefghijklmnopqrstuvwxyz"[tail]


def _dispatch(model: Model, node: OpNode, strategy: Strategy, tp: int) -> int:
    seen = model.metas_for(node)
    local = tuple(
        replace(seen[name], shape=local_shape(seen[name].shape, place, tp, 0))
        for name, place in zip(node.operands, strategy.inputs, strict=True)
    )
    return dispatch_bytes(node, local)


def _with_context(
    costs: tuple[LayoutCost, ...], variant: Resolved, ways: tuple[Recompute, ...], context: Context, kind: int,
    key: TableKey, model: CostModel,
) -> tuple[tuple[LayoutCost, ...], int]:  # fmt: skip
    """The costs with what the context axis adds, and the largest of its collectives."""
    forward, backward = context_collectives(context, kind, variant.sources, key.tp)
    extra = context_bytes(context, kind, variant.sources, key.tp, ways)
    forward_us, backward_us = (sum(map(model.collective_us, issued)) for issued in (forward, backward))
    found = []
    for cost, recompute, memory in zip(costs, ways, extra, strict=True):
        again = forward if recompute == "full" else []
        found.append(
            replace(
                cost,
                forward_comm_us=cost.forward_comm_us + forward_us,
                backward_comm_us=cost.backward_comm_us + sum(map(model.collective_us, again), backward_us),
                activation_bytes=cost.activation_bytes + memory.kept,
                transient_bytes=cost.transient_bytes + memory.transient,
                collectives=cost.collectives + count_collectives("cp", [*forward, *backward, *again]),
            )
        )
    return tuple(found), max((each.num_bytes for each in (*forward, *backward)), default=0)


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
    for solution in solve_sweep(problem, prices, fixed):
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
    for name in sg.shared_params:
        touching = [g for g in groups if g & slots[name]]
        groups = [g for g in groups if not g & slots[name]] + [slots[name].union(*touching)]
    return tuple(tuple(sorted(group)) for group in groups)


def fix_shared(sg: SegmentedGraph, problems: tuple[Problem, ...], prices: Prices) -> tuple[Fixed, ...]:
    """Best joint placement of parameters that several classes read: every one is tried, classes weighted by use.

    With several such parameters each is settled in turn, the earlier ones fixed.
    """
    fixed: tuple[Fixed, ...] = tuple({} for _ in problems)
    if problems[0].degree == 1:
        return fixed
    uses = [sum(segment.kind == kind for segment in sg.segments) for kind in range(len(problems))]
    for group in shared_slots(sg):
        possible = _placements(problems, group)
        if not possible:
            names = ", ".join(sorted({name.removeprefix("param:") for _, name in group}))
            raise InputError(
                f"what is pinned, forbidden and kept leaves {names}, which several segments share, no placement that "
                "suits them all; free one of them"
            )
        best = min(possible, key=lambda place: _joint_cost(problems, uses, fixed, group, place, prices))
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
