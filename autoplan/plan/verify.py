"""Is this Plan whole in itself, and is it a plan for this Graph and this many ranks?

Every PlanError names the place as it stands in the plan file (``stages[1].layouts[3]``), what was expected, what was
found and what to change.
"""

import math
from collections.abc import Iterable, Mapping
from typing import assert_never

from autoplan.errors import PlanError
from autoplan.ir import Graph
from autoplan.plan.plan import (
    MESH_AXES,
    SCHEMA_VERSION,
    CollectiveCount,
    Layout,
    OpPlacement,
    ParamPlacement,
    Plan,
    Stage,
)
from autoplan.plan.schedule import allowed, rank_of
from autoplan.sharding import Partial, Placement, Replicate, Shard, Strategy, can_split

COLLECTIVE_AXES = ("tp", "cp", "ep", "dp", "replicas", "experts", "pp", "tied")

_CHAIN = "the stages must cover the chain of segments in order, without a gap"


def verify_plan(plan: Plan) -> None:
    """Raise PlanError unless the parts of the plan fit each other."""
    _require(
        plan.schema_version == SCHEMA_VERSION,
        "schema_version",
        f"expected {SCHEMA_VERSION}, found {plan.schema_version}: search again",
    )
    _verify_mesh(plan)
    _verify_batch(plan)
    _verify_chain(plan)
    _verify_layouts(plan)
    _verify_stages(plan)
    _verify_params(plan)
    _verify_amounts("step_us", plan.step.by_cause)


def _require(condition: bool, path: str, message: str) -> None:
    if not condition:
        raise PlanError(f"{path}: {message}")


def _require_unique(names: Iterable[str], path: str) -> None:
    seen: set[str] = set()
    for name in names:
        _require(name not in seen, path, f"{name!r} stands there twice: rename or remove one")
        seen.add(name)


def _verify_mesh(plan: Plan) -> None:
    axes = ", ".join(MESH_AXES)
    _require(
        sorted(plan.mesh.axes) == sorted(MESH_AXES), "mesh", f"the axes are {axes}, found {', '.join(plan.mesh.axes)}"
    )
    found, expected = plan.mesh.num_devices, plan.cluster.num_devices
    product = " x ".join(f"{axis} {plan.mesh.size(axis)}" for axis in plan.mesh.axes)
    _require(
        found == expected,
        "mesh",
        f"{product} = {found} devices, but the cluster {plan.cluster} has {expected}: "
        "change the mesh or the cluster, or search again",
    )


def _verify_batch(plan: Plan) -> None:
    _require(plan.batch_size >= 1, "batch_size", f"expected at least 1, found {plan.batch_size}")
    _require(plan.num_microbatches >= 1, "num_microbatches", f"expected at least 1, found {plan.num_microbatches}")
    _require(
        plan.batch_size % plan.parts == 0,
        "num_microbatches",
        f"the global batch of {plan.batch_size} does not divide into {plan.parts} equal parts "
        f"(dp {plan.mesh.size('dp')} x {plan.num_microbatches} microbatches): choose another number",
    )
    reason = allowed(plan.schedule, plan.mesh.size("pp"), plan.chunks, plan.num_microbatches)
    _require(not reason, "schedule", f"{plan.schedule} cannot run: {reason}")
    for name, degree in (("shards", plan.shards), ("expert", plan.expert)):
        _require(
            degree >= 1 and plan.data_ranks % degree == 0,
            name,
            f"expected a divisor of the {plan.data_ranks} data ranks (dp x cp), found {degree}",
        )
    whole = plan.data == "replicate"
    _require(
        not (whole and plan.shards > 1), "shards", f'mode "replicate" splits nothing: expected 1, found {plan.shards}'
    )


def _verify_chain(plan: Plan) -> None:
    _require_unique(plan.kind_names, "kind_names")
    _require(bool(plan.segment_kinds), "segments", "a plan needs at least one segment: search again")
    for i, kind in enumerate(plan.segment_kinds):
        known = len(plan.kind_names)
        _require(0 <= kind < known, f"segments[{i}]", f"kind {kind} is not one of the {known} in kind_names")
    expected, found = len(plan.segment_kinds), len(plan.segment_params)
    _require(found == expected, "segments", f"{expected} segments, but parameters are listed for {found}: search again")
    _require_unique((node for node, _ in plan.prelude), "prelude")
    _require_unique((value for value, _ in plan.inputs), "inputs")


def _verify_layouts(plan: Plan) -> None:
    _require_unique((layout.name for layout in plan.layouts), "layouts")
    first_of_kind: dict[int, Layout] = {}
    for i, layout in enumerate(plan.layouts):
        path = f"layouts[{i}]"
        _require(0 <= layout.kind < len(plan.kind_names), f"{path}.kind", f"{layout.kind} is not in kind_names")
        _require_unique((op.node for op in layout.ops), f"{path}.ops")
        _verify_collectives(f"{path}.cost.collectives", layout.cost.collectives)
        _verify_same_segment(path, layout, first_of_kind.setdefault(layout.kind, layout))


def _verify_same_segment(path: str, layout: Layout, other: Layout) -> None:
    """Layouts of one kind run the same ops and have as many values going in and out."""
    fix = f"both are layouts of the same kind: copy the list from {other.name!r}"
    for name, found, expected in (
        ("inputs", len(layout.inputs), len(other.inputs)),
        ("outputs", len(layout.outputs), len(other.outputs)),
    ):
        message = f"{found} placements, but {other.name!r} has {expected}; {fix}"
        _require(found == expected, f"{path}.{name}", message)
    same_ops = tuple(op.node for op in layout.ops) == tuple(op.node for op in other.ops)
    _require(same_ops, f"{path}.ops", f"other ops than {other.name!r} has; {fix}")


def _verify_stages(plan: Plan) -> None:
    pp, found = plan.mesh.size("pp"), len(plan.stages)
    expected = pp * plan.chunks
    each = "one" if plan.chunks == 1 else f"{plan.chunks}"
    _require(found == expected, "stages", f"expected {expected} stages, {each} per place on the pp axis, found {found}")
    start = 0
    for i, stage in enumerate(plan.stages):
        path, end = f"stages[{i}]", stage.end
        _require(stage.start == start, f"{path}.start", f"expected {start}, found {stage.start}: {_CHAIN}")
        _require(end > start, f"{path}.end", f"expected more than {start}, found {end}: {_CHAIN}")
        rank = rank_of(plan.schedule, pp, plan.chunks, i)
        _require(stage.rank == rank, f"{path}.rank", f"{plan.schedule} runs it on {rank}, found {stage.rank}")
        start = stage.end
    expected = len(plan.segment_kinds)
    _require(start == expected, f"stages[{found - 1}].end", f"expected {expected}, found {start}: {_CHAIN}")
    for i, stage in enumerate(plan.stages):
        _verify_stage(f"stages[{i}]", stage, plan)


def _verify_stage(path: str, stage: Stage, plan: Plan) -> None:
    size, found = stage.end - stage.start, len(stage.layouts)
    _require(found == size, f"{path}.layouts", f"expected one for each of the {size} segments, found {found}")
    kinds = {layout.name: layout.kind for layout in plan.layouts}
    for j, name in enumerate(stage.layouts):
        at, kind = f"{path}.layouts[{j}]", plan.segment_kinds[stage.start + j]
        fits = ", ".join(layout.name for layout in plan.layouts if layout.kind == kind) or "none"
        segment = f"segment {stage.start + j} is of kind {plan.kind_names[kind]!r}; layouts of that kind: {fits}"
        _require(name in kinds, at, f"there is no layout {name!r}; {segment}")
        _require(kinds[name] == kind, at, f"layout {name!r} is for {plan.kind_names[kinds[name]]!r}, but {segment}")
    _verify_amounts(f"{path}.memory_bytes", stage.memory.by_cause)
    _verify_collectives(f"{path}.collectives", stage.collectives)


def _verify_amounts(path: str, by_cause: tuple[tuple[str, float], ...]) -> None:
    _require_unique((cause for cause, _ in by_cause), path)
    for cause, amount in by_cause:
        _require(0 <= amount < math.inf, f"{path}[{cause!r}]", f"expected a finite number >= 0, found {amount}")


def _verify_collectives(path: str, collectives: tuple[CollectiveCount, ...]) -> None:
    for i, collective in enumerate(collectives):
        axis = collective.axis
        _require(axis in COLLECTIVE_AXES, f"{path}[{i}].axis", f"{axis!r} is not one of {', '.join(COLLECTIVE_AXES)}")


def _verify_params(plan: Plan) -> None:
    names = [p.name for p in plan.params]
    _require_unique(names, "parameter_names")
    known = set(names)
    for i, segment in enumerate(plan.segment_params):
        for name in segment:
            _require(name in known, "segments", f"segment {i} reads {name!r}, which is not in parameter_names: add it")
    for param in plan.params:
        _verify_param(f'parameters["{param.name}"]', param, plan)


def _verify_param(path: str, param: ParamPlacement, plan: Plan) -> None:
    partial = isinstance(param.tensor, Partial)
    _require(
        not partial, f"{path}.tp", "a parameter cannot be Partial: use Shard, Replicate or Replicate(partial_grad)"
    )
    match param.data:
        case Shard(dim=dim, blocks=1):
            free = not (isinstance(param.tensor, Shard) and param.tensor.dim == dim)
            _require(free, f"{path}.dp", f"tp splits dim {dim} already: choose another dim, or Replicate")
            fix = "write Replicate, or set data to 'shard'"
            _require(plan.data == "shard", f"{path}.dp", f"{param.data} does not go with data {plan.data!r}: {fix}")
        case Replicate(partial_grad=False):
            pass
        case _:
            _require(False, f"{path}.dp", f"expected Shard(DIM) or Replicate, found {param.data}")


# --- against a graph -------------------------------------------------------------------------------------------------


def verify_plan_for(plan: Plan, graph: Graph, world_size: int | None = None) -> None:
    """Raise PlanError unless the plan was made for this graph and, where given, for this many ranks."""
    if world_size is not None:
        verify_world_size(plan, world_size)
    names = tuple(p.name for p in graph.params)
    planned = tuple(p.name for p in plan.params)
    if set(names) == set(planned) and plan.batch_size != graph.batch_size:
        raise PlanError(
            f"the plan was made for a global batch of {plan.batch_size}, this run passes {graph.batch_size}: "
            f"pass {plan.batch_size} samples, or search again with --global-batch {graph.batch_size}"
        )
    if plan.graph_digest != graph.digest:
        raise PlanError(
            f"the plan was made for {plan.model} (graph {plan.graph_digest}), this model is another one "
            f"(graph {graph.digest}){_difference(planned, names)}: search again for this model, "
            "or give it the plan that belongs to it"
        )
    verify_param_shapes(plan, {p.name: p.meta.shape for p in graph.params})
    _verify_ops(plan, graph)


def verify_world_size(plan: Plan, world_size: int) -> None:
    """Raise PlanError unless the run has as many ranks as the mesh has devices."""
    needed = plan.mesh.num_devices
    if world_size != needed:
        product = " x ".join(f"{axis} {plan.mesh.size(axis)}" for axis in plan.mesh.axes)
        raise PlanError(
            f"the plan needs {needed} ranks ({product}), this run has {world_size}: start it with "
            f"`torchrun {_launch(plan)}`, or search for a cluster of {world_size}"
        )


def _launch(plan: Plan) -> str:
    nodes = plan.cluster.num_nodes
    per_node = f"--nproc-per-node {plan.cluster.devices_per_node}"
    return f"--nnodes {nodes} {per_node}" if nodes > 1 else per_node


def _difference(planned: tuple[str, ...], names: tuple[str, ...]) -> str:
    """First parameter that only one side has, or that shapes or code differ."""
    for name in planned:
        if name not in names:
            return f"; the plan's parameter {name!r} is not in it"
    for name in names:
        if name not in planned:
            return f"; its parameter {name!r} is not in the plan"
    return "; its parameters have the same names, but its shapes, its inputs or its code differ"


def verify_param_shapes(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PlanError unless every parameter, by name with its shape, can be split as planned."""
    for param in plan.params:
        path = f'parameters["{param.name}"]'
        _require(param.name in shapes, path, f"the model has no such parameter: {plan.model} has {len(shapes)} others")
        _verify_split(f"{path}.tp", shapes[param.name], param.tensor, plan.mesh.size("tp"))
        _verify_split(f"{path}.ep", shapes[param.name], param.expert, plan.expert)
        _verify_split(f"{path}.dp", shapes[param.name], param.data, shards_of(plan, param))
    planned = {p.name for p in plan.params}
    for name in shapes:
        _require(name in planned, "parameter_names", f"the model's parameter {name!r} is missing: search again")


def shards_of(plan: Plan, param: ParamPlacement) -> int:
    """Data ranks that share this parameter's states; those of experts are the ranks that hold the same experts."""
    if not isinstance(param.expert, Shard):
        return plan.shards
    return plan.data_ranks // plan.expert if plan.shards == plan.data_ranks else max(1, plan.shards // plan.expert)


def _verify_split(path: str, shape: tuple[int, ...], placement: Placement, degree: int) -> None:
    match placement:
        case Shard(dim=dim, blocks=blocks):
            _require(dim < len(shape), path, f"{placement} needs a dim {dim}, but its shape is {list(shape)}")
            divides = can_split(shape[dim], degree, blocks)
            within = f" within each of {blocks} blocks" if blocks > 1 else ""
            message = f"dim {dim} of {list(shape)} cannot be split over {degree}{within}: choose another dim"
            _require(divides, path, message)
        case Replicate() | Partial():
            pass
        case _:
            assert_never(placement)


def _verify_ops(plan: Plan, graph: Graph) -> None:
    nodes = {node.name: (len(node.operands), len(node.results)) for node in graph.nodes}
    for i, layout in enumerate(plan.layouts):
        for j, op in enumerate(layout.ops):
            _verify_op(f"layouts[{i}].ops[{j}]", op, nodes)
    for node, strategy in plan.prelude:
        _require(node in nodes, f'prelude["{node}"]', "the model has no such op: search again")
        _verify_arity(f'prelude["{node}"]', strategy, nodes[node])
    expected, found = {i.value for i in graph.inputs}, {name for name, _ in plan.inputs}
    _require(expected == found, "inputs", f"expected {', '.join(sorted(expected))}, found {', '.join(sorted(found))}")


def _verify_op(path: str, op: OpPlacement, nodes: dict[str, tuple[int, int]]) -> None:
    _require(op.node in nodes, f"{path}.node", f"the model has no op {op.node!r}: search again")
    _verify_arity(f"{path}.batch", op.batch, nodes[op.node])
    _verify_arity(f"{path}.tensor", op.tensor, nodes[op.node])


def _verify_arity(path: str, strategy: Strategy, arity: tuple[int, int]) -> None:
    found = (len(strategy.inputs), len(strategy.outputs))
    message = f"{strategy}: expected {arity[0]} placements before the arrow and {arity[1]} after it"
    _require(found == arity, path, message)
