"""The whole search in one function: a segmented graph, a cluster and a cost model in, the best Plan out."""

import logging
import time
from collections.abc import Callable

from autoplan.cluster import Cluster
from autoplan.cost import CostModel
from autoplan.ir import SegmentedGraph
from autoplan.plan.plan import Plan
from autoplan.solver.assemble import assemble
from autoplan.solver.batch import split_batch
from autoplan.solver.pins import check_pins
from autoplan.solver.remedies import infeasible
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
    shortfall and what would help, when nothing fits. At the time limit the best plan so far is returned and says so
    among its assumptions.
    """
    start = time.monotonic()
    split = split_batch(sg)
    check_pins(sg, split, cluster, request)
    tables = Tables(sg=sg, split=split, cluster=cluster, cost=cost, recompute=request.recompute)
    state = search(tables, request, progress)
    if state.best is None:
        raise infeasible(tables, request)
    plan = assemble(state, state.best, profile_digest)
    log.info(
        "solved %d points for %s in %.1f s: %s", state.num_solved, cluster, time.monotonic() - start,
        state.best.setting.point,
    )  # fmt: skip
    return plan
