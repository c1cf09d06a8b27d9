"""A run's plan -> its predicted step, by the functions that price a plan at the end of a search.

A model is traced once for all its runs; the strategies of a layer are chosen once per table (tensor degree, microbatch,
boundary) with every matrix pinned where the run had it. What the search's space leaves out (large microbatches, a
tensor axis that crosses nodes) is priced all the same: a pinned plan has no limits.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import lcm

import torch
from families import Model, Shape

from accuracy.models import shape_of
from accuracy.places import cost_model_of
from accuracy.plans import Pinned, plan_of, refusal, weight_pins
from accuracy.rows import Run
from autoplan.cost_models import ProfileCostModel
from autoplan.errors import AutoplanError
from autoplan.ir import SegmentedGraph
from autoplan.plan.plan import Recompute
from autoplan.sharding import Shard
from autoplan.solver.batch import BatchSplit, split_batch
from autoplan.solver.choice import Resolved
from autoplan.solver.constraints import Constraints, is_whole
from autoplan.solver.constraints_text import parse_constraints
from autoplan.solver.mesh import Degrees, Point
from autoplan.solver.milp import SolveState
from autoplan.solver.pins import attention_heads
from autoplan.solver.pricing import setting_at
from autoplan.solver.problem import Candidate, NodeProblem, Problem
from autoplan.solver.request import Request
from autoplan.solver.setting import Setting, facts_of
from autoplan.solver.step import Step, step_from
from autoplan.solver.tables import Option, Table, TableKey, Tables, fix_shared, solve_variants, sweep
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

ADAM_STATES = 2
_SEQUENCE = Shard(1)
_RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
_GROUP_KEY = tuple[Shape, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A run with its prediction, or with why there is none."""

    run: Run
    step: Step | None = None
    reason: str = ""
    rank: int = 0

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        assert self.step is not None
        return self.step.total_us / 1e6

    @property
    def peak_gib(self) -> float:
        """Predicted peak of allocated memory, of the rank that was measured where the table says which."""
        assert self.step is not None
        memory = self.step.memory
        measured = memory[0] if "rank 0" in self.run.memory_kind or "rank0" in self.run.notes else None
        return float(measured.total if measured else self.step.peak_bytes) / 2**30

    @property
    def fits(self) -> bool:
        """Whether the fullest device has the memory, reserve taken off."""
        assert self.step is not None
        return self.step.overflow_bytes <= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A model with what tables of it start from."""

    sg: SegmentedGraph
    split: BatchSplit
    pinned: Constraints


@dataclass(slots=True, kw_only=True)
class Pricer:
    """Prices runs; keeps what several of them share."""

    batches: dict[Shape, int] = field(default_factory=dict)
    """Samples to trace a model with: every microbatch of its runs divides them."""
    traced: dict[Shape, Traced] = field(default_factory=dict)
    tables: dict[tuple[Shape, str, int], Tables] = field(default_factory=dict)
    """By model, device with its links, and devices of a node."""
    options: dict[tuple[Shape, str, int, TableKey], tuple[tuple[Resolved, ...], Table]] = field(default_factory=dict)

    def expect(self, runs: Iterable[Run]) -> None:
        """Learn which microbatches there will be."""
        for run in runs:
            if not refusal(run):
                shape = shape_of(run)
                self.batches[shape] = lcm(self.batches.get(shape, 2), 2 * run.microbatch)

    def price(self, run: Run) -> Priced:
        """The prediction, or the reason why there is none."""
        reason = refusal(run)
        cost = cost_model_of(run)
        if reason or cost is None:
            return Priced(run=run, reason=reason or f"no profile for {run.gpu}")
        shape = shape_of(run)
        try:
            return Priced(run=run, step=self._step(run, shape, plan_of(run, shape), cost))
        except AutoplanError as error:
            return Priced(run=run, reason=f"cannot be pinned: {str(error)[:120]}")

    def _step(self, run: Run, shape: Shape, plan: Pinned, cost: ProfileCostModel) -> Step:
        ways = (plan.recompute,) if plan.recompute else _RECOMPUTES
        steps = [self._step_by(run, shape, plan, cost, way) for way in ways]
        return next((step for step in steps if step.overflow_bytes <= 0), steps[-1])

    def _step_by(self, run: Run, shape: Shape, plan: Pinned, cost: ProfileCostModel, way: Recompute) -> Step:
        key = TableKey(tp=run.tp, cp=run.cp, cp_per_node=1, microbatch=run.microbatch, sequence=plan.sequence)
        tables = self._tables(shape, cost)
        variants, table = self._variants(shape, cost, tables, key)
        setting = _setting(replace(tables, cluster=cost.cluster), table, _point(run, plan), plan)
        made = _options(tables, variants, key, way)
        chain = [made[segment.kind] for segment in tables.sg.segments]
        chosen = [tuple(chain[start:end]) for start, end in zip(plan.edges, plan.edges[1:], strict=False)]
        return step_from(setting, chosen, SolveState.FEASIBLE)

    def _tables(self, shape: Shape, cost: ProfileCostModel) -> Tables:
        key = (shape, cost.profile.digest, cost.cluster.devices_per_node)
        if key not in self.tables:
            traced = self._traced(shape)
            self.tables[key] = Tables(
                sg=traced.sg, split=traced.split, cluster=cost.cluster, cost=cost, constraints=traced.pinned,
                heads=attention_heads(traced.sg.graph),
            )  # fmt: skip
        return self.tables[key]

    def _traced(self, shape: Shape) -> Traced:
        if shape not in self.traced:
            with torch.device("meta"):
                model = Model(shape)
                tokens = torch.zeros(self.batches[shape], shape.seq_len, dtype=torch.long)
            traced = trace_model(model, {"idx": tokens, "targets": tokens}, batch_dims=(0, 0), dtype="bfloat16")
            sg = segment_graph(traced.graph)
            assert len(sg.segments) == shape.num_layers + 2, "embedding, layers and head are one segment each"
            pins = Request(model="run", dtype="bfloat16", pins=weight_pins(shape))
            self.traced[shape] = Traced(sg=sg, split=split_batch(sg), pinned=parse_constraints(pins, sg))
        return self.traced[shape]

    def _variants(
        self, shape: Shape, cost: ProfileCostModel, tables: Tables, key: TableKey
    ) -> tuple[tuple[Resolved, ...], Table]:
        """How each class runs at its fastest with its matrices where they are pinned."""
        place = (shape, cost.profile.digest, cost.cluster.devices_per_node, key)
        if place not in self.options:
            prices = sweep(tables.cluster, tables.cost, key.tp)[:1]
            problems = tuple(as_pinned(problem, tables, key) for problem in tables.problems(key))
            fixed = fix_shared(tables.sg, problems, prices[0])
            variants = tuple(
                solve_variants(problem, prices, fixed[kind], set())[0] for kind, problem in enumerate(problems)
            )
            context, _ = tables.context(key)
            self.options[place] = variants, Table(key=key, options=(), states=frozenset(), context=context)
        return self.options[place]


def as_pinned(problem: Problem, tables: Tables, key: TableKey) -> Problem:
    """The problem without what a search may choose and Megatron-LM does not do: moving a pinned matrix before it is
    used, splitting norms where the sequence is whole, and norms of whole sequences where it is split."""
    if problem.degree == 1:
        return problem
    required = {name: wish.placement for name, wish in tables.constraints.required.items()}
    _, model = tables.context(key)

    def fits(node: NodeProblem, candidate: Candidate) -> bool:
        pairs = zip(node.operands, candidate.strategy.inputs, strict=True)
        if not all(place == required.get(name, place) for name, place in pairs):
            return False
        if "_norm" not in model.nodes[node.name].op:
            return True
        return _SEQUENCE in candidate.strategy.outputs if key.sequence else is_whole(candidate.strategy)

    nodes = tuple(
        replace(node, candidates=tuple(c for c in node.candidates if fits(node, c)) or node.candidates)
        for node in problem.nodes
    )
    return replace(problem, nodes=nodes)


def _options(tables: Tables, variants: tuple[Resolved, ...], key: TableKey, way: Recompute) -> list[Option]:
    """Layers recompute; embedding and head do not, but gather again as the layers do."""
    context, model = tables.context(key)
    layers = max(range(len(variants)), key=lambda kind: sum(s.kind == kind for s in tables.sg.segments))
    return [
        tables.option(kind, variant, way if kind == layers or way == "gather" else "none", model, context, key, 0)
        for kind, variant in enumerate(variants)
    ]


def _point(run: Run, plan: Pinned) -> Point:
    return Point(
        degrees=Degrees(pp=plan.pp, dp=run.dp, cp=run.cp, tp=run.tp),
        microbatch=run.microbatch,
        num_microbatches=run.num_microbatches,
        schedule="interleaved" if run.chunks > 1 and plan.pp > 1 else "1f1b",
        chunks=run.chunks if plan.pp > 1 else 1,
        data=plan.data,
        shards=plan.shards,
    )


def _setting(tables: Tables, table: Table, point: Point, plan: Pinned) -> Setting:
    """What is fixed at the plan. Tensor ranks send whole values in parts, as Megatron-LM does."""
    setting = setting_at(tables, facts_of(tables.sg, plan.precision, ADAM_STATES), point, table)
    if plan.sequence or point.tp == 1:
        return setting
    return replace(setting, cut_bytes=tuple(tuple(size // point.tp for size in cut) for cut in setting.cut_bytes))
