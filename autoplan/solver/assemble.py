"""The best step found -> the Plan, complete: nothing in it needs the solver again."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version

from autoplan.ir import Param, SegmentedGraph
from autoplan.plan.data_axis import data_placement
from autoplan.plan.plan import (
    Choice,
    Layout,
    OpPlacement,
    ParamPlacement,
    Plan,
    Precision,
    Proof,
    RunnerUp,
    Stage,
)
from autoplan.plan.schedule import rank_of
from autoplan.plan.words import time_text
from autoplan.sharding import REPLICATE, Placement, Shard, local_shape
from autoplan.solver.collect import stage_collectives
from autoplan.solver.context import Context, sequence_length
from autoplan.solver.request import Request
from autoplan.solver.stagecost import StageCost
from autoplan.solver.state import Loss, Search
from autoplan.solver.step import Step
from autoplan.solver.tables import Option, TableKey, Tables
from autoplan.solver.work import forward_work

_MOST_RUNNERS_UP = 24
_MOST_ON_FRONT = 8


def assemble(state: Search, best: Step, profile_digest: str) -> Plan:
    """Write down the answer of a search."""
    proof = _proof(state)
    return replace(
        write_plan(state.tables, state.request, best, profile_digest, proof, _status(state, proof.gap(best.total_us))),
        runners_up=_runners_up(state, best),
        choices=_choices(state, best),
    )


def write_plan(
    tables: Tables, request: Request, best: Step, profile_digest: str, proof: Proof, verdict: str
) -> Plan:  # fmt: skip
    """Write down a step, wherever it comes from; ``verdict`` says for the list of assumptions what was proven."""
    point, sg = best.setting.point, tables.sg
    return Plan(
        version=version("autoplan"),
        model=request.model,
        graph_digest=sg.graph.digest,
        batch_size=sg.graph.batch_size,
        dtype="/".join(sorted({param.meta.dtype for param in sg.graph.params})),
        cluster=tables.cluster,
        profile_digest=profile_digest,
        mesh=point.degrees.mesh,
        schedule=point.schedule,
        chunks=point.chunks,
        num_microbatches=point.num_microbatches,
        data=point.data,
        shards=point.shards,
        expert=point.expert,
        offload=point.offload,
        precision=request.precision,
        kind_names=sg.kind_names,
        segment_kinds=tuple(segment.kind for segment in sg.segments),
        segment_params=tuple(tuple(map(param_name, segment.params)) for segment in sg.segments),
        prelude=tuple((name, tables.split.strategy(name)) for name in sg.prelude),
        inputs=tables.split.inputs,
        params=_params(best),
        layouts=_layouts(tables, best, _context_of(tables, best)),
        stages=tuple(_stage(best, s) for s in range(len(best.stages))),
        step=best.amounts,
        runners_up=(),
        proof=proof,
        model_flops=model_flops(sg),
        peak_flops_per_s=tables.cost.peak_flops_per_s(request.dtype),
        tokens=sg.graph.batch_size * (sequence_length(sg) or 0),
        origin=request.origin,
        assumptions=_assumptions(request, best, verdict),
    )


def _params(best: Step) -> tuple[ParamPlacement, ...]:
    """Every parameter, in the order of the graph; one that no segment reads is whole."""
    sg, placements = best.setting.sg, {}
    options = [option for stage in best.stages for option in stage.options]
    for segment, option in zip(sg.segments, options, strict=True):
        first = sg.representative(segment.kind).params
        for name, same in zip(segment.params, first, strict=True):
            placements[name] = option.resolved.sources[same]
    experts = {name for option in options for name in option.experts}
    found = []
    for param in sg.graph.params:
        tensor = placements.get(param.value, REPLICATE)
        found.append(_placed(best, param, tensor, param.value in placements, param.value in experts))
    return tuple(found)


def _placed(best: Step, param: Param, tensor: Placement, is_read: bool, is_expert: bool) -> ParamPlacement:
    point = best.setting.point
    expert: Placement = Shard(0) if is_expert and point.expert > 1 else REPLICATE
    shape = param.meta.shape
    if expert != REPLICATE:
        shape = local_shape(local_shape(shape, tensor, point.tp, 0), expert, point.expert, 0)
    data: Placement = REPLICATE
    if point.data == "shard" and is_read:
        data = data_placement(shape, tensor, point.expert_shards if expert != REPLICATE else point.shards)
    return ParamPlacement(name=param.name, tensor=tensor, data=data, expert=expert)


def param_name(value: str) -> str:
    """Name in ``state_dict`` of a parameter's value."""
    return value.removeprefix("param:")


def _context_of(tables: Tables, best: Step) -> Context | None:
    return tables.context(key_of(best))[0]


def key_of(step: Step) -> TableKey:
    """The table that the step's options come from."""
    point = step.setting.point
    return TableKey(
        tp=point.tp,
        cp=point.cp,
        cp_per_node=step.setting.groups.context.per_node,
        microbatch=point.microbatch,
        sequence=step.setting.sequence,
    )


def _layouts(tables: Tables, best: Step, context: Context | None) -> tuple[Layout, ...]:
    used = {option.name: option for stage in best.stages for option in stage.options}
    ordered = sorted(used, key=lambda name: (used[name].kind, name))
    return tuple(_layout(tables, used[name], context) for name in ordered)


def _layout(tables: Tables, option: Option, context: Context | None) -> Layout:
    ways = {} if context is None else context.strategies(option.kind)
    resolved, segment = option.resolved, tables.sg.representative(option.kind)
    leaving: dict[str, Placement | None] = dict(resolved.problem.outputs)
    return Layout(
        name=option.name,
        kind=option.kind,
        recompute=option.recompute,
        ops=tuple(
            OpPlacement(
                node=node.name,
                batch=tables.split.strategy(node.name),
                tensor=candidate.strategy,
                context=ways.get(node.name),
            )
            for node, candidate in resolved.nodes
        ),
        inputs=tuple(resolved.sources[name] for name in segment.inputs),
        outputs=tuple(leaving[name] or resolved.sources[name] for name in segment.outputs),
        cost=option.cost,
    )


def _stage(best: Step, index: int) -> Stage:
    stage: StageCost = best.stages[index]
    point = best.setting.point
    rank = rank_of(point.schedule, point.pp, point.chunks, index)
    return Stage(
        start=stage.start,
        end=stage.end,
        layouts=tuple(option.name for option in stage.options),
        forward_us=stage.forward_us,
        backward_us=stage.backward_us,
        weight_us=stage.weight_us,
        memory=best.memory[rank],
        collectives=stage_collectives(best.setting, best.stages, index),
        rank=rank,
    )


def _runners_up(state: Search, best: Step) -> tuple[RunnerUp, ...]:
    """The best of every other mesh, fastest first; refused ones last."""
    mine = best.setting.point.degrees
    chosen = (mine.pp, mine.dp, mine.cp, mine.tp)
    others = [loss for degrees, loss in sorted(state.losses.items()) if degrees != chosen]
    others.sort(key=lambda loss: (loss.step_us is None, loss.step_us or 0.0))
    return tuple(_runner_up(loss, best) for loss in others[:_MOST_RUNNERS_UP])


def _runner_up(loss: Loss, best: Step) -> RunnerUp:
    label = str(loss.point)
    if loss.step is not None:
        label += f", recompute {'/'.join(sorted({o.recompute for s in loss.step.stages for o in s.options}))}"
    return RunnerUp(label=label, step_us=loss.step_us, reason=_reason(loss, best))


def _reason(loss: Loss, best: Step) -> str:
    if loss.step_us is None:
        return f"refused: {loss.reason}"
    percent = (loss.step_us / best.total_us - 1) * 100
    if loss.step is None and percent < 0:
        return f"left out: at most {-percent:.1f}% faster, by its lower bound"
    slower = f"{percent:.1f}% slower"
    if loss.step is None:
        return f"left out: at least {slower}, by its lower bound"
    mine = dict(best.amounts)
    differences = [(cause, value - mine[cause]) for cause, value in loss.step.amounts]
    cause, worst = max(differences, key=lambda pair: pair[1])
    return f"{slower}: {time_text(worst)} more {cause}"


def _proof(state: Search) -> Proof:
    ordered = sorted(state.refusals.items(), key=lambda pair: (-pair[1], pair[0]))
    return Proof(
        status=state.status,
        bound_us=state.bound_us,
        bound_by="the least lower bound among all candidates: those solved, by their relaxation; the others, by "
        "compute at the profile's best and the communication that their tables cannot avoid",
        num_solved=state.num_solved,
        num_bounded=state.num_bounded,
        num_refused=sum(state.refusals.values()),
        refusals=tuple(ordered),
    )


def _choices(state: Search, best: Step) -> tuple[Choice, ...]:
    """The plans kept, and those of all solved that no other beats in time and memory both."""
    front = _front(state.solved)
    wanted = {id(step): step for step in (*state.kept, *front[:_MOST_ON_FRONT])} | {id(best): best}
    ordered = sorted(wanted.values(), key=lambda step: (step is not best, step.total_us, step.peak_bytes))
    on_front = {id(step) for step in front}
    return tuple(
        Choice(label=_label(step), step=step.amounts, peak_bytes=step.peak_bytes, on_front=id(step) in on_front)
        for step in ordered
    )


def _front(steps: Sequence[Step]) -> list[Step]:
    found: list[Step] = []
    for step in sorted(steps, key=lambda step: (step.total_us, step.peak_bytes)):
        if not found or step.peak_bytes < found[-1].peak_bytes:
            found.append(step)
    return found


def _label(step: Step) -> str:
    ways = "/".join(sorted({option.recompute for stage in step.stages for option in stage.options}))
    return f"{step.setting.point}, recompute {ways}"


def model_flops(sg: SegmentedGraph) -> int:
    """Matrix FLOPs of a step on the whole batch: forward, and twice that for backward."""
    total = 0
    for node in sg.graph.nodes:
        operands = tuple(sg.graph.metas[name] for name in node.operands)
        work = forward_work(node, operands, node.outputs)
        if work is not None and work.kind != "memory":
            total += 3 * work.flops
    return total


def _assumptions(request: Request, best: Step, verdict: str) -> tuple[tuple[str, str], ...]:
    setting = best.setting
    pins = ", ".join(f"{name}={value}" for name, value in request.pinned) or "nothing"
    return (
        ("dtype", request.dtype),
        ("state dtype", _dtypes(request.precision)),
        ("optimizer", f"{request.optimizer}, {request.optimizer_states} states per parameter"),
        ("batch", f"{setting.sg.graph.batch_size} samples a step, {setting.point.microbatch} per microbatch and rank"),
        ("boundary", "sequence (dim 1)" if setting.sequence else "whole"),
        ("gradients", _gradients(best)),
        ("overlap", "only gathers and scatters of sharded parameters, behind the compute of their own segment"),
        ("pinned", pins),
        ("search", verdict),
        *request.assumptions,
    )


def _dtypes(precision: Precision) -> str:
    if precision == Precision():
        return "parameters, gradients and optimizer states have the dtype of the parameter"
    own = "the parameter's"
    master = f", a master copy in {precision.master}" if precision.master else ""
    return (
        f"gradients in {precision.gradients or own}, summed in {precision.reductions or precision.gradients or own}, "
        f"optimizer states in {precision.states or precision.master or own}{master}"
    )


def _gradients(best: Step) -> str:
    data = best.setting.data_axis
    if data.gathers and data.num_microbatches > 1:
        return "reduced once a step; they add up unsharded over the microbatches"
    if data.mode == "zero2" and data.num_microbatches > 1:
        return "reduced after each microbatch"
    return "reduced once a step"


def _status(state: Search, share: float) -> str:
    gap = 100 * share
    match state.status:
        case "complete":
            return f"complete: within {gap:.2f}% of the optimum of the cost model"
        case "time limit":
            limit = f"time limit of {state.request.time_limit_s:g} s"
            return f"{limit}: best plan so far, within {gap:.1f}% of the bound"
        case "interrupted":
            return f"interrupted: best plan so far, within {gap:.1f}% of the bound"
        case "priced":
            return "none: priced as given"
