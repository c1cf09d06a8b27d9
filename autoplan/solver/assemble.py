"""The best step found -> the Plan, complete: nothing in it needs the solver again."""

from importlib.metadata import version

from autoplan.plan.data_axis import data_placement
from autoplan.plan.plan import Layout, OpPlacement, ParamPlacement, Plan, RunnerUp, Stage
from autoplan.plan.words import time_text
from autoplan.sharding import REPLICATE, Placement
from autoplan.solver.collect import stage_collectives
from autoplan.solver.milp import SolveState
from autoplan.solver.search import Loss, Search
from autoplan.solver.stagecost import StageCost
from autoplan.solver.step import GAP, Step
from autoplan.solver.tables import Option, Tables

_MOST_RUNNERS_UP = 24


def assemble(state: Search, best: Step, profile_digest: str) -> Plan:
    """Write down the answer of a search."""
    tables, point, sg = state.tables, best.setting.point, state.tables.sg
    return Plan(
        version=version("autoplan"),
        model=state.request.model,
        graph_digest=sg.graph.digest,
        batch_size=sg.graph.batch_size,
        dtype="/".join(sorted({param.meta.dtype for param in sg.graph.params})),
        cluster=tables.cluster,
        profile_digest=profile_digest,
        mesh=point.mesh,
        schedule="1f1b",
        num_microbatches=point.num_microbatches,
        data=point.data,
        kind_names=sg.kind_names,
        segment_kinds=tuple(segment.kind for segment in sg.segments),
        segment_params=tuple(tuple(map(param_name, segment.params)) for segment in sg.segments),
        prelude=tuple((name, tables.split.strategy(name)) for name in sg.prelude),
        inputs=tables.split.inputs,
        params=_params(best),
        layouts=_layouts(tables, best),
        stages=tuple(_stage(best, s) for s in range(len(best.stages))),
        step=best.amounts,
        runners_up=_runners_up(state, best),
        assumptions=_assumptions(state, best),
    )


def _params(best: Step) -> tuple[ParamPlacement, ...]:
    """Every parameter, in the order of the graph; one that no segment reads is whole."""
    sg, placements = best.setting.sg, {}
    options = [option for stage in best.stages for option in stage.options]
    for segment, option in zip(sg.segments, options, strict=True):
        first = sg.representative(segment.kind).params
        for name, same in zip(segment.params, first, strict=True):
            placements[name] = option.resolved.sources[same]
    sharded, dp = best.setting.point.data_axis.is_sharded, best.setting.point.dp
    found = []
    for param in sg.graph.params:
        tensor = placements.get(param.value, REPLICATE)
        read = param.value in placements
        data = data_placement(param.meta.shape, tensor, dp) if sharded and read else REPLICATE
        found.append(ParamPlacement(name=param.name, tensor=tensor, data=data))
    return tuple(found)


def param_name(value: str) -> str:
    """Name in ``state_dict`` of a parameter's value."""
    return value.removeprefix("param:")


def _layouts(tables: Tables, best: Step) -> tuple[Layout, ...]:
    used = {option.name: option for stage in best.stages for option in stage.options}
    return tuple(_layout(tables, used[name]) for name in sorted(used, key=lambda name: (used[name].kind, name)))


def _layout(tables: Tables, option: Option) -> Layout:
    resolved, segment = option.resolved, tables.sg.representative(option.kind)
    leaving: dict[str, Placement | None] = dict(resolved.problem.outputs)
    return Layout(
        name=option.name,
        kind=option.kind,
        recompute=option.recompute,
        ops=tuple(
            OpPlacement(node=node.name, batch=tables.split.strategy(node.name), tensor=candidate.strategy)
            for node, candidate in resolved.nodes
        ),
        inputs=tuple(resolved.sources[name] for name in segment.inputs),
        outputs=tuple(leaving[name] or resolved.sources[name] for name in segment.outputs),
        cost=option.cost,
    )


def _stage(best: Step, index: int) -> Stage:
    stage: StageCost = best.stages[index]
    last = len(best.setting.sg.segments)
    after = best.setting.send_us(stage.end) if stage.end < last else 0.0
    forward = sum(s.forward_us + s.forward_comm_us + s.forward_gather_us for s in stage.segments)
    return Stage(
        start=stage.start,
        end=stage.end,
        layouts=tuple(option.name for option in stage.options),
        forward_us=forward + stage.held_gather_us + after,
        backward_us=stage.time_us - forward - stage.held_gather_us - after,
        memory=stage.memory,
        collectives=stage_collectives(best.setting, best.stages, index),
    )


def _runners_up(state: Search, best: Step) -> tuple[RunnerUp, ...]:
    """The best of every other mesh, fastest first; refused ones last."""
    others = [loss for degrees, loss in sorted(state.losses.items()) if degrees != best.setting.point.degrees]
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
    slower = f"{(loss.step_us / best.total_us - 1) * 100:.1f}% slower"
    if loss.step is None:
        return f"left out: at least {slower}, by its lower bound"
    mine = dict(best.amounts)
    differences = [(cause, value - mine[cause]) for cause, value in loss.step.amounts]
    cause, worst = max(differences, key=lambda pair: pair[1])
    return f"{slower}: {time_text(worst)} more {cause}"


def _assumptions(state: Search, best: Step) -> tuple[tuple[str, str], ...]:
    request, setting = state.request, best.setting
    pins = ", ".join(f"{name}={value}" for name, value in request.pins) or "nothing"
    return (
        ("dtype", request.dtype),
        ("state dtype", "parameters, gradients and optimizer states have the dtype of the parameter"),
        ("optimizer", f"{request.optimizer}, {request.optimizer_states} states per parameter"),
        ("batch", f"{setting.sg.graph.batch_size} samples a step, {setting.point.microbatch} per microbatch and rank"),
        ("boundary", "sequence (dim 1)" if setting.sequence else "whole"),
        ("gradients", _gradients(best)),
        ("overlap", "only gathers and scatters of sharded parameters, behind the compute of their own segment"),
        ("pinned", pins),
        ("search", _status(state, best)),
        *request.assumptions,
    )


def _gradients(best: Step) -> str:
    if best.setting.point.data_axis.is_sharded and best.setting.point.num_microbatches > 1:
        return "reduced once a step; they add up unsharded over the microbatches"
    return "reduced once a step"


def _status(state: Search, best: Step) -> str:
    if state.out_of_time:
        gap = 100 * max(0.0, 1 - state.bound_us / best.total_us)
        return f"time limit of {state.request.time_limit_s:g} s: best plan so far, within {gap:.1f}% of the bound"
    inexact = best.state is not SolveState.OPTIMAL
    table = state.tables.table(best.setting.point.tp, best.setting.point.microbatch, best.setting.sequence)
    inexact = inexact or SolveState.FEASIBLE in table.states
    exact = "a part was stopped at its limit, feasible with gap" if inexact else f"optimal within {GAP:.1%} per point"
    return f"complete: {state.num_solved} points solved, the others excluded by bound or memory; {exact}"
