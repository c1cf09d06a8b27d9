"""The public calls, wired together: ``search`` (see ``planning``) and ``compile``, which runs a model by a plan.

This layer alone knows trace, solver, cost models and runtime at once. It imports torch, so ``import autoplan`` loads
it only when one of its names is used.
"""

import inspect
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from autoplan.errors import AutoplanError, InputError
from autoplan.plan.plan import Plan
from autoplan.plan.verify import verify_plan, verify_plan_for
from autoplan.planning import search
from autoplan.runtime.clip import clip_grad_norm_
from autoplan.runtime.deferred import DeferredModule
from autoplan.runtime.mesh import start_process_group
from autoplan.runtime.module import ParallelModule, TracedCall
from autoplan.solver.legal import check_strategies
from autoplan.solver.request import OptimizerName
from autoplan.trace.capture import flatten_inputs, trace_model, unflatten_outputs
from autoplan.trace.inputs import Inputs
from autoplan.trace.segments import segment_graph

__all__ = ["clip_grad_norm_", "compile"]

log = logging.getLogger(__name__)


def compile(
    model: nn.Module,
    plan: Plan | str | Path | None = None,
    *,
    example_inputs: Inputs | None = None,
    optimizer: OptimizerName = "adamw",
    time_limit_s: float = 60.0,
) -> nn.Module:
    """Make ``model`` run by ``plan`` on the ranks of this run; the training loop stays as it is.

    ``plan`` is a Plan, a plan file, or None to search one for the running ranks with ``example_inputs`` at the global
    batch (without them: at the first call, and parameters are to be had only after it). Started by ``torchrun``, or
    alone as one rank. Every rank passes the global batch. Returns a module whose parameters are DTensors; ``model``
    itself is left as it was. Raises PlanError when the plan belongs to another model or number of ranks.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"autoplan.compile wants an nn.Module, found {type(model).__name__}")
    start_process_group()
    if plan is None and example_inputs is None:
        if any(p.is_meta for p in model.parameters()):
            raise InputError(
                "a model on the meta device is filled before its first call, and so needs its plan by then: pass "
                "plan= or example_inputs="
            )
        return DeferredModule(lambda args, kwargs: compile(
            model, example_inputs=_as_inputs(model, args, kwargs), optimizer=optimizer, time_limit_s=time_limit_s
        ))  # fmt: skip
    if plan is None:
        assert example_inputs is not None
        plan = _search_together(model, example_inputs, optimizer, time_limit_s)
    else:
        plan = plan if isinstance(plan, Plan) else Plan.load(str(plan))
        if example_inputs is not None:
            verify_plan_for(plan, trace_model(model, example_inputs).graph, world_size=dist.get_world_size())
    verify_plan(plan)
    return ParallelModule(model, plan, partial(_trace_call, plan))


def _search_together(model: nn.Module, inputs: Inputs, optimizer: OptimizerName, time_limit_s: float) -> Plan:
    """Search on rank 0 for all ranks, so that a time limit cannot give two ranks two plans."""
    found: list[Plan | AutoplanError | None] = [None]
    if dist.get_rank() == 0:
        try:
            found[0] = search(
                model, inputs, cluster=_running_cluster(), optimizer=optimizer, time_limit_s=time_limit_s, runnable=True
            )
        except AutoplanError as error:
            found[0] = error
        except Exception as error:
            # The other ranks wait for an answer, also when it is a bug.
            dist.broadcast_object_list([AutoplanError(f"the search failed on rank 0: {error!r}")], src=0)
            raise
    dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], AutoplanError):
        raise found[0]
    assert isinstance(found[0], Plan)
    return found[0]


def _running_cluster() -> str:
    """The cluster spec of the ranks that run now: ``NODESxRANKSxDEVICE``."""
    world = dist.get_world_size()
    if "nccl" not in dist.get_backend():
        return f"{world}xcpu"
    per_node = min(world, torch.cuda.device_count())
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ").replace(" ", "-")
    return f"{world // per_node}x{per_node}x{device}"


def _as_inputs(model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Inputs:
    """One call's arguments as trace_model takes them."""
    if not kwargs:
        return args
    return kwargs if not args else dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def _trace_call(plan: Plan, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> TracedCall:
    traced = trace_model(model, _as_inputs(model, args, kwargs))
    segmented = segment_graph(traced.graph)
    check_strategies(plan, segmented)
    log.info("traced the model for a call in %s mode", "training" if traced.training else "evaluation")
    return TracedCall(
        segmented=segmented,
        constants=traced.constants,
        flatten=partial(flatten_inputs, traced),
        unflatten=partial(unflatten_outputs, traced),
    )
