"""PuLP states the problems, HiGHS solves them in this process; CBC where highspy cannot be loaded."""

import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import pulp


class SolveState(Enum):
    """How a solve ended; they never blur."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible with gap"
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time limit without a solution"
    CRASH = "solver failed"
    BEATEN = "nothing faster than the cutoff"

    @property
    def has_solution(self) -> bool:
        """Whether values can be read."""
        return self in (SolveState.OPTIMAL, SolveState.FEASIBLE)


def run_solver(
    lp: pulp.LpProblem,
    time_limit_s: float,
    gap: float = 0.0,
    *,
    relaxed: bool = False,
    most_nodes: int | None = None,
) -> SolveState:
    """Solve with one thread, a fixed seed and no output. OPTIMAL means within the relative ``gap``.

    ``relaxed`` lets integers be fractions: the objective is then a lower bound. ``most_nodes`` limits the branch and
    bound in a way that does not depend on the machine (HiGHS only).
    """
    start = time.monotonic()
    mip = not relaxed
    limits = {} if most_nodes is None else {"mip_max_nodes": most_nodes}
    solver = pulp.HiGHS(mip=mip, msg=False, threads=1, gapRel=gap, timeLimit=time_limit_s, random_seed=0, **limits)
    if not solver.available():
        solver = pulp.PULP_CBC_CMD(mip=mip, msg=False, threads=1, gapRel=gap, timeLimit=time_limit_s)
    try:
        with _quiet():
            lp.solve(solver)
    except pulp.PulpSolverError:
        return SolveState.CRASH
    except KeyError:  # PuLP has no word for HiGHS's limit in nodes; it has read the values by then
        found = float(lp.solverModel.getInfo().objective_function_value)
        return SolveState.FEASIBLE if abs(found) < float("inf") else SolveState.TIME_LIMIT
    return _state(lp, out_of_time=time.monotonic() - start >= time_limit_s)


def dual_bound(lp: pulp.LpProblem, state: SolveState) -> float:
    """Lower bound that a solved or stopped minimisation has proven; infinite when infeasible, 0 when none is known."""
    if state is SolveState.INFEASIBLE:
        return float("inf")
    solved = getattr(lp, "solverModel", None)
    if solved is None or not hasattr(solved, "getInfo"):
        return float(pulp.value(lp.objective)) if state is SolveState.OPTIMAL else 0.0
    bound = float(solved.getInfo().mip_dual_bound)
    return max(0.0, bound) if math.isfinite(bound) else 0.0


def _state(lp: pulp.LpProblem, *, out_of_time: bool) -> SolveState:
    if lp.status == pulp.LpStatusInfeasible:
        return SolveState.INFEASIBLE
    if lp.sol_status == pulp.LpSolutionOptimal:
        return SolveState.OPTIMAL
    if lp.sol_status == pulp.LpSolutionIntegerFeasible:
        return SolveState.FEASIBLE
    return SolveState.TIME_LIMIT if out_of_time else SolveState.CRASH


@contextmanager
def _quiet() -> Iterator[None]:
    """Send what native code writes to standard output nowhere: HiGHS prints its banner before it can be told not to."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
