"""The strategies of a given plan, found again among the candidates that the rules allow at the shapes at hand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoplan.cluster import Group
from autoplan.errors import InputError
from autoplan.ir import Segment
from autoplan.plan.plan import Layout, Plan
from autoplan.sharding import Placement, Strategy
from autoplan.solver.assemble import param_name
from autoplan.solver.build import Model
from autoplan.solver.choice import Choice, Resolved, resolve
from autoplan.solver.context import Context, context_problems
from autoplan.solver.problem import Axis, NodeProblem, Problem
from autoplan.solver.tables import Option, TableKey, Tables, trivial_choice


def found_options(plan: Plan, tables: Tables, key: TableKey) -> tuple[Option, ...]:
    """The option of every segment. Raises InputError naming the op, weight or value that cannot be so here.

    Segments of one layout whose weights lie differently, as in a plan that was edited, get options of their own.
    """
    context, model = tables.context(key)
    problems = tables.problems(key)
    placements = {param.name: param.tensor for param in plan.params}
    made: dict[tuple[str, tuple[Placement, ...]], Option] = {}
    options = []
    names = [name for stage in plan.stages for name in stage.layouts]
    for segment, name in zip(tables.sg.segments, names, strict=True):
        places = tuple(placements[param_name(value)] for value in segment.params)
        if (name, places) not in made:
            layout, problem = plan.layout(name), problems[segment.kind]
            first = tables.sg.representative(segment.kind)
            variant = _resolved(layout, problem, model, dict(zip(first.params, places, strict=True)))
            _check_edges(layout, first, variant, model)
            option = tables.option(segment.kind, variant, layout.recompute, model, context, key, 0)
            number = sum(known == name for known, _ in made)
            made[name, places] = named(option, f"{name}.{number + 1}" if number else name)
        options.append(made[name, places])
    return tuple(options)


def named(option: Option, name: str) -> Option:
    """The option under another name."""
    return replace(option, name=name)


def _resolved(layout: Layout, problem: Problem, model: Model, places: Mapping[str, Placement]) -> Resolved:
    if problem.degree == 1:
        return resolve(problem, trivial_choice(problem))
    candidates = _candidates(problem, model, [op.tensor for op in layout.ops], "tensor")
    params = tuple(_param_places(problem, places))
    return resolve(problem, Choice(candidates=candidates, params=params))


def _param_places(problem: Problem, places: Mapping[str, Placement]) -> Iterator[tuple[str, Placement]]:
    for value in problem.values:
        if value.origin != "param":
            continue
        if places[value.name] not in value.sources:
            raise InputError(
                f"{param_name(value.name)} {value.meta} cannot be {places[value.name]} over tp={problem.degree} here; "
                f"it can be {', '.join(map(str, value.sources))}: search again"
            )
        yield value.name, places[value.name]


def _candidates(problem: Problem, model: Model, wanted: Sequence[Strategy], axis: str) -> tuple[int, ...]:
    """Which candidate of each node the plan has chosen."""
    if len(wanted) != len(problem.nodes):
        raise InputError(
            f"the plan lists {len(wanted)} ops for a layer that has {len(problem.nodes)} here: search again"
        )
    return tuple(
        _index(node, strategy, model, axis, problem.degree)
        for node, strategy in zip(problem.nodes, wanted, strict=True)
    )


def _index(node: NodeProblem, strategy: Strategy, model: Model, axis: str, degree: int) -> int:
    for index, candidate in enumerate(node.candidates):
        if candidate.strategy == strategy:
            return index
    op = model.nodes[node.name]
    shapes = ", ".join(str(model.graph.metas[name]) for name in op.operands)
    raise InputError(
        f"{op.where} cannot run as {strategy} over {degree} ranks of the {axis} axis here: its operands are "
        f"{shapes or 'none'}. The plan was made for other shapes or edited: search again"
    )


def _check_edges(layout: Layout, first: Segment, variant: Resolved, model: Model) -> None:
    """What arrives and leaves lies as the plan says."""
    leaving = dict(variant.problem.outputs)
    pairs = [*zip(first.inputs, layout.inputs, strict=True), *zip(first.outputs, layout.outputs, strict=True)]
    for name, planned in pairs if variant.problem.degree > 1 else ():
        found = leaving.get(name) or variant.sources[name]
        if found != planned:
            raise InputError(
                f"{name} {model.graph.metas[name]} crosses between layers as {planned} in layout {layout.name}, and "
                f"here it is {found}: tp={variant.problem.degree} does not split it so at this size. Search again"
            )


def found_context(plan: Plan, tables: Tables, key: TableKey) -> Context:
    """The plan's own split of the sequence. Raises InputError naming the op that cannot be split so here."""
    model = tables.model(key.microbatch)
    axis = Axis(group=Group(size=key.cp, per_node=key.cp_per_node), cost=tables.cost)
    problems, crossing = context_problems(model, tables.split, axis, key.tp)
    resolved = tuple(_on_context(plan, kind, problem, model) for kind, problem in enumerate(problems))
    return Context(degree=key.cp, resolved=resolved, crossing=crossing)


def _on_context(plan: Plan, kind: int, problem: Problem, model: Model) -> Resolved:
    first, *others = [layout for layout in plan.layouts if layout.kind == kind]
    ways = _context_ways(first)
    for layout in others:
        if _context_ways(layout) != ways:
            raise InputError(f"layouts {first.name} and {layout.name} split the sequence in two ways: make them alike")
    params = tuple((value.name, value.sources[0]) for value in problem.values if value.origin == "param")
    return resolve(problem, Choice(candidates=_candidates(problem, model, ways, "context"), params=params))


def _context_ways(layout: Layout) -> list[Strategy]:
    missing = [op.node for op in layout.ops if op.context is None]
    if missing:
        raise InputError(f"layout {layout.name} does not say how {missing[0]} runs on the context axis: search again")
    return [op.context for op in layout.ops if op.context is not None]
