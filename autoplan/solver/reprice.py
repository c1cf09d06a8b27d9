"""A given plan priced again, without a search: as it is, or at other shapes, another batch, on another cluster.

The strategies of every layout, and the placements of the parameters, are found again among the candidates of the
class's problem, so that what is priced is what the plan says and nothing else. From there on everything is computed as
at the end of a search: a plan on its own model, cluster and batch gets exactly its own figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from autoplan.cluster import Cluster
from autoplan.cost import CostModel
from autoplan.ir import SegmentedGraph
from autoplan.plan.place import check_chain
from autoplan.plan.plan import Plan, Proof
from autoplan.sharding import Shard
from autoplan.solver.assemble import write_plan
from autoplan.solver.batch import check_parts, split_batch
from autoplan.solver.mesh import Point, groups_of
from autoplan.solver.milp import SolveState
from autoplan.solver.moved import moved_words, point_on
from autoplan.solver.pins import attention_heads
from autoplan.solver.pricing import setting_at
from autoplan.solver.problem import Problem
from autoplan.solver.refind import found_context, found_options
from autoplan.solver.request import Request
from autoplan.solver.setting import Setting, facts_of
from autoplan.solver.step import Step, step_from
from autoplan.solver.tables import Option, Table, TableKey, Tables


@dataclass(frozen=True, kw_only=True)
class Given:
    """A plan laid over a model and a cluster, with all that its price, and the price of any change to it, needs."""

    plan: Plan
    tables: Tables
    key: TableKey
    setting: Setting
    options: tuple[Option, ...] = field(repr=False)
    """Of every segment."""
    notes: tuple[str, ...] = ()
    """What had to follow the cluster and the batch."""

    @property
    def edges(self) -> tuple[int, ...]:
        """Where stages begin, and the end of the chain."""
        return (*(stage.start for stage in self.plan.stages), self.plan.stages[-1].end)

    @cached_property
    def step(self) -> Step:
        """The plan as it is."""
        return self.step_with()

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """The problem of every class on the tensor axis."""
        return self.tables.problems(self.key)

    def step_with(self, changed: Mapping[int, Option] | None = None, edges: Sequence[int] | None = None) -> Step:
        """The plan with other options for some segments, or with other cuts."""
        options = [(changed or {}).get(index, option) for index, option in enumerate(self.options)]
        chosen = [tuple(options[start:end]) for start, end in pairwise(edges or self.edges)]
        return step_from(self.setting, chosen, SolveState.FEASIBLE)


def reprice(
    plan: Plan, sg: SegmentedGraph, cluster: Cluster, cost: CostModel, request: Request, profile_digest: str
) -> Plan:
    """The plan as it is, priced on this model, cluster and batch; its proof says that nothing was searched.

    ``request`` says for whom it is written: dtypes, optimizer, origin. Raises InputError naming the degree, op or
    weight that cannot be here.
    """
    given = give(plan, sg, cluster, cost, request)
    notes = tuple(("note", f"priced elsewhere: {words}") for words in given.notes)
    told = replace(request, assumptions=(*request.assumptions, *notes))
    proof = Proof(
        status="priced",
        bound_us=0.0,
        bound_by="none: the plan was given, and nothing was searched",
        num_solved=0,
        num_bounded=0,
        num_refused=0,
    )
    return write_plan(given.tables, told, given.step, profile_digest, proof, "none: priced as given, not searched")


def give(plan: Plan, sg: SegmentedGraph, cluster: Cluster, cost: CostModel, request: Request) -> Given:
    """Lay the plan over the model. Raises InputError as ``reprice``, PlanError for another model."""
    point = point_on(plan, cluster, sg.graph.batch_size)
    classed = with_classes(plan, sg)
    split = split_batch(classed)
    check_parts(split, classed.graph, point.dp * point.num_microbatches)
    tables = Tables(sg=classed, split=split, cluster=cluster, cost=cost, heads=attention_heads(sg.graph))
    key = _key(plan, point, cluster)
    if key.cp > 1:
        tables.adopt(key, found_context(plan, tables, key))
    return _laid(plan, tables, key, point, request)


def with_classes(plan: Plan, sg: SegmentedGraph) -> SegmentedGraph:
    """The graph with the plan's classes, which divide its own. Raises PlanError where the chain is another one."""
    check_chain(plan, sg)
    segments = tuple(replace(s, kind=kind) for s, kind in zip(sg.segments, plan.segment_kinds, strict=True))
    return replace(sg, segments=segments, kind_names=plan.kind_names)


def _key(plan: Plan, point: Point, cluster: Cluster) -> TableKey:
    crossing = (place for layout in plan.layouts for place in layout.inputs)
    return TableKey(
        tp=point.tp,
        cp=point.cp,
        cp_per_node=groups_of(point, cluster).context.per_node,
        microbatch=point.microbatch,
        sequence=point.tp > 1 and any(isinstance(place, Shard) for place in crossing),
    )


def _laid(plan: Plan, tables: Tables, key: TableKey, point: Point, request: Request) -> Given:
    facts = facts_of(tables.sg, request.precision, request.optimizer_states)
    options = found_options(plan, tables, key)
    empty = Table(key=key, options=(), states=frozenset())
    return Given(
        plan=plan,
        tables=tables,
        key=key,
        setting=setting_at(tables, facts, point, empty),
        options=options,
        notes=moved_words(plan, point),
    )
