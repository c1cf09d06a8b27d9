"""One choice inside a layer made otherwise, and what the whole plan then costs.

For each other candidate of an op, or placement of a weight, the layers that are asked about are solved again around
it: with all else in the layer as it is, for time, and for memory. The best of these that fits counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.sharding import Placement
from autoplan.solver.block import make_block, solve
from autoplan.solver.choice import Choice, Resolved, resolve
from autoplan.solver.problem import Prices, Problem
from autoplan.solver.refind import named
from autoplan.solver.reprice import Given
from autoplan.solver.step import Step
from autoplan.solver.tables import Option, sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Force:
    """What must be in one layer, by the names of the first segment of its class."""

    params: tuple[tuple[str, Placement], ...] = ()
    node: tuple[int, int] | None = None
    """Number of an op and of its candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """The plan with that choice made."""

    step: Step
    before: Option
    after: Option
    """Of the first layer that is asked about."""
    too_large: Step | None = None
    """The fastest with that choice that does not fit, where one is faster than all that do."""

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return self.step.overflow_bytes <= 0


def best_forced(given: Given, forces: Mapping[int, Force]) -> Forced:
    """The best plan that obeys a force in each of these segments, all other segments as in the plan."""
    first = min(forces)
    made: dict[tuple[str, Force], tuple[Option, ...]] = {}
    for index, force in forces.items():
        key = given.options[index].name, force
        if key not in made:
            made[key] = tuple(_options(given, index, force))
    found = []
    for trial in range(len(made[given.options[first].name, forces[first]])):
        changed = {index: made[given.options[index].name, force][trial] for index, force in forces.items()}
        step = given.step_with(changed)
        found.append(Forced(step=step, before=given.options[first], after=changed[first]))
    best = min(found, key=lambda f: (not f.fits, f.step.total_us if f.fits else f.step.overflow_bytes))
    fastest = min(found, key=lambda f: f.step.total_us)
    return best if fastest.fits else replace(best, too_large=fastest.step)


def layer_prices(given: Given) -> tuple[Prices, ...]:
    """Time alone at the plan's microbatches, and memory dear."""
    _, dear = sweep(given.tables.cluster, given.tables.cost, given.key.tp)
    return Prices(step=1 / given.setting.point.num_microbatches), dear


def held_params(given: Given, index: int) -> dict[str, Placement]:
    """Weights of a segment that others read too, which must stay where they are."""
    shared, option = set(given.tables.sg.shared_params), given.options[index]
    segment = given.tables.sg.segments[index]
    first = given.tables.sg.representative(segment.kind)
    kept = [same for name, same in zip(segment.params, first.params, strict=True) if name in shared]
    values = {v.name for v in option.resolved.problem.values if v.origin == "param"}
    return {name: option.resolved.sources[name] for name in kept if name in values}


def _options(given: Given, index: int, force: Force) -> Iterator[Option]:
    option = given.options[index]
    problem, places = option.resolved.problem, dict(force.params)
    yield _option(given, option, resolve(problem, _changed(option.resolved, force)))
    fixed = {**held_params(given, index), **places}
    block = make_block(_restricted(problem, force))
    for prices in layer_prices(given):
        choice = solve(block, prices, fixed).choice
        assert choice is not None, "a layer that runs one way has an answer"
        yield _option(given, option, resolve(block.problem, choice))


def _restricted(problem: Problem, force: Force) -> Problem:
    if force.node is None:
        return problem
    number, candidate = force.node
    nodes = list(problem.nodes)
    nodes[number] = replace(nodes[number], candidates=(nodes[number].candidates[candidate],))
    return replace(problem, nodes=tuple(nodes))


def _changed(resolved: Resolved, force: Force) -> Choice:
    """The plan's choice with the forced one in its place."""
    candidates = chosen_numbers(resolved)
    if force.node is not None:
        candidates[force.node[0]] = force.node[1]
    places = dict(force.params)
    params = tuple(
        (v.name, places.get(v.name, resolved.sources[v.name])) for v in resolved.problem.values if v.origin == "param"
    )
    return Choice(candidates=tuple(candidates), params=params)


def chosen_numbers(resolved: Resolved) -> list[int]:
    """The number of each node's candidate."""
    return [node.candidates.index(candidate) for node, candidate in resolved.nodes]


def _option(given: Given, before: Option, resolved: Resolved) -> Option:
    context, model = given.tables.context(given.key)
    found = given.tables.option(before.kind, resolved, before.recompute, model, context, given.key, 0)
    return named(found, f"{before.name}.otherwise")


def compute_us(option: Option) -> float:
    """One layer and microbatch, compute alone."""
    return option.cost.forward_us + option.cost.backward_us


def comm_us(option: Option) -> float:
    """One layer and microbatch, communication inside it."""
    return option.cost.forward_comm_us + option.cost.backward_comm_us


def ranked(costs: Sequence[float], chosen: int, most: int) -> list[int]:
    """Numbers of the cheapest others."""
    order = sorted(range(len(costs)), key=lambda i: (costs[i], i))
    return [i for i in order if i != chosen][:most]
