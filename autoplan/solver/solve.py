"""The whole search in one function: a segmented graph, a cluster and a cost model in, the best Plan out."""

import logging
import time
from collections.abc import Callable

from autoplan.cluster import Cluster
from autoplan.cost import CostModel
from autoplan.errors import InputError
from autoplan.ir import SegmentedGraph
from autoplan.plan.plan import RECOMPUTE, Plan
from autoplan.solver.assemble import assemble
from autoplan.solver.batch import split_batch
from autoplan.solver.constraints import allows, refine_classes
from autoplan.solver.constraints_text import parse_constraints
from autoplan.solver.context import context_degrees
from autoplan.solver.experts import num_experts
from autoplan.solver.pins import attention_heads, check_pins, tensor_degrees
from autoplan.solver.points import Space, make_space
from autoplan.solver.remedies import infeasible
from autoplan.solver.replay import fastest_in_replay
from autoplan.solver.request import Request
from autoplan.solver.search import search
from autoplan.solver.tables import Tables

log = logging.getLogger(__name__)


def _silent(_message: str) -> None:
    """The default progress callback."""


def solve(
    sg: SegmentedGraph,
    cluster: Cluster,
    cost: CostModel,
    request: Request,
    profile_digest: str,
    progress: Callable[[str], None] = _silent,
) -> Plan:
    """Find the fastest plan that fits the memory. Same input, same plan, unless the time limit strikes.

    Raises InputError for pins that cannot be, RuleError for ops without a rule, and InfeasibleError, with the
    shortfall and what would help, when nothing fits. At the time limit, or on Ctrl-C, the best plan so far is returned
    and its proof says so.
    """
    start = time.monotonic()
    tables, space = prepare(sg, cluster, cost, request)
    state = search(tables, space, request, progress)
    if state.best is None:
        raise infeasible(tables, space, request)
    progress("playing the best candidates through")
    ranked = sorted(state.solved, key=lambda step: step.total_us)
    best = fastest_in_replay(ranked)
    plan = assemble(state, best, profile_digest)
    log.info(
        "solved %d points for %s in %.1f s: %s", state.num_solved, cluster, time.monotonic() - start,
        best.setting.point,
    )  # fmt: skip
    return plan


def prepare(sg: SegmentedGraph, cluster: Cluster, cost: CostModel, request: Request) -> tuple[Tables, Space]:
    """What a search, or the price of a plan, starts from. Raises InputError for pins that cannot be."""
    split = split_batch(sg)
    contexts = context_degrees(sg, split, cluster)
    experts = num_experts(sg)
    check_pins(sg, split, cluster, request, context_degrees=contexts, num_experts=experts)
    constraints = parse_constraints(request, sg)
    refined = refine_classes(sg, constraints)
    wanted = RECOMPUTE if request.recompute is None else (request.recompute,)
    ways = tuple(way for way in wanted if not allows(constraints, recompute=way))
    if not ways:
        raise InputError("every way to recompute is forbidden; allow one of " + ", ".join(RECOMPUTE))
    tables = Tables(
        sg=refined, split=split, cluster=cluster, cost=cost, recompute=ways, constraints=constraints,
        heads=attention_heads(sg.graph),
    )  # fmt: skip
    degrees = (tensor_degrees(sg, cluster), contexts)
    return tables, make_space(refined, split, cluster, request, degrees, experts, constraints)
