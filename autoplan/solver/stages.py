"""Cutting the chain into pipeline stages and choosing an option per segment, as a MILP over counts.

Variables
    n[s, r, o]   segments of run r that stage s runs by option o; integer          (_add_counts)
    z[s, r]      stages 0..s together finish run r; binary                         (_add_order)
    b[s, r, o]   stage s uses the option at all; binary                            (_add_memory)
    h[s, g]      stage s holds the shared parameter g                              (_add_shared)
    T, B, E      longest rank of one microbatch, bubble, longest work at the end of a step
Objective
    m T + B + E,   B >= beta (sum of the ranks' times - T - what a row of the schedule hides), for each row

``chain.objective_us`` and ``chain.rank_bytes`` state the same without a solver. docs/formulation.md has the
mathematics. Most chains need no MILP: ``construct`` cuts them and ``dual`` proves the cut good enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pulp

from autoplan.solver.chain import (
    ChainProblem,
    Counts,
    OptionCost,
    least_longest_us,
    objective_us,
)
from autoplan.solver.construct import construct
from autoplan.solver.dual import lower_bound_us
from autoplan.solver.exact import better, try_all
from autoplan.solver.milp import SolveState, dual_bound, run_solver
from autoplan.solver.wholeranks import MOST_RANKS, slowest_rank

MOST_COUNTS = 80
"""Integers of a MILP that is worth its time when a gap is allowed; larger chains keep what was constructed."""
MOST_COUNTS_THOROUGH, NODES_THOROUGH = 600, 20
"""The same for the one point whose proof decides that of the whole search."""
MOST_COUNTS_RANK = 30
"""Integers of one rank for which its MILP is worth its time at every point."""
MOST_NODES = 500
"""Nodes of one branch and bound; a limit in nodes, not seconds, keeps answers the same on every machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolution:
    """The end of one solve."""

    state: SolveState
    counts: Counts | None
    """There when the state is OPTIMAL or FEASIBLE."""
    bound_us: float
    """No counts have a shorter step; infinite when nothing fits."""


def solve_stages(
    chain: ChainProblem,
    *,
    gap: float = 0.0,
    cutoff_us: float = float("inf"),
    time_limit_s: float = 60.0,
    thorough: bool = False,
) -> ChainSolution:
    """Best cut and options, proven within the relative ``gap``: by bounds where they suffice, else by the MILP.

    With a gap, only small chains go to the MILP, or ``thorough`` ones for a few nodes.

    INFEASIBLE when there are fewer segments than stages or no choice fits the memory; BEATEN when nothing is faster
    than ``cutoff_us``.
    """
    if chain.num_segments < len(chain.stages):
        return ChainSolution(state=SolveState.INFEASIBLE, counts=None, bound_us=float("inf"))
    bound, found = 0.0, None
    for closer, counts in _without_milp(chain, thorough):
        bound, found = max(bound, closer), better(chain, found, counts or ())
        if bound == float("inf"):
            return ChainSolution(state=SolveState.INFEASIBLE, counts=None, bound_us=bound)
        if found is not None and _within(objective_us(chain, found), bound, gap):
            return ChainSolution(state=SolveState.OPTIMAL, counts=found, bound_us=bound)
        if bound >= cutoff_us:
            return ChainSolution(state=SolveState.BEATEN, counts=None, bound_us=bound)
    if gap > 0 and _num_counts(chain) > (MOST_COUNTS_THOROUGH if thorough else MOST_COUNTS):
        state = SolveState.FEASIBLE if found is not None else SolveState.TIME_LIMIT
        return ChainSolution(state=state, counts=found, bound_us=bound)
    nodes = NODES_THOROUGH if gap > 0 and thorough else MOST_NODES
    return _by_milp(chain, found, bound, gap, cutoff_us, time_limit_s, nodes)


def _without_milp(chain: ChainProblem, thorough: bool) -> Iterator[tuple[float, Counts | None]]:
    """Lower bounds and counts, the cheapest first; what the next one costs is spent only where they leave a gap."""
    yield lower_bound_us(chain), None
    yield 0.0, construct(chain)
    yield try_all(chain) or (0.0, None)
    if _by_whole_ranks(chain, thorough):
        slowest_us, counts = slowest_rank(chain, _least)
        yield lower_bound_us(chain, slowest_us=slowest_us), counts


def _by_whole_ranks(chain: ChainProblem, thorough: bool) -> bool:
    """Whether a MILP per rank is worth its time: they are small where a rank has few stages."""
    if chain.cuts is not None or len(chain.ranks) > MOST_RANKS:
        return False
    return thorough or _num_counts(chain) <= MOST_COUNTS_RANK * len(chain.ranks)


def _within(time_us: float, bound_us: float, gap: float) -> bool:
    return time_us * (1 - gap) <= bound_us * (1 + 1e-12)


def _by_milp(
    chain: ChainProblem, found: Counts | None, bound: float, gap: float, cutoff_us: float, time_limit_s: float,
    nodes: int,
) -> ChainSolution:  # fmt: skip
    upper = min(cutoff_us, objective_us(chain, found) if found is not None else float("inf"))
    model = _state(chain, overflow=False)
    times = _add_objective(model)
    if upper < float("inf"):
        model.add(times <= upper * (1 + 1e-9))
    state = run_solver(model.lp, time_limit_s, gap, most_nodes=nodes)
    bound = max(bound, upper if state is SolveState.INFEASIBLE else dual_bound(model.lp, state))
    counts = _read(model) if state.has_solution else None
    if counts is not None and (found is None or objective_us(chain, counts) < objective_us(chain, found)):
        found = counts
    if found is None:
        beaten = state is SolveState.INFEASIBLE and cutoff_us < float("inf")
        return ChainSolution(state=SolveState.BEATEN if beaten else state, counts=None, bound_us=bound)
    value = objective_us(chain, found)
    exact = _within(value, bound, max(gap, 1e-6))
    return ChainSolution(
        state=SolveState.OPTIMAL if exact else SolveState.FEASIBLE, counts=found, bound_us=min(bound, value)
    )


def _least(chain: ChainProblem) -> tuple[float, Counts | None]:
    """What a small chain takes at least, to a ten-thousandth, and by which counts."""
    solution = _by_milp(chain, None, 0.0, 1e-4, float("inf"), 5.0, MOST_NODES)
    return solution.bound_us, solution.counts


def _num_counts(chain: ChainProblem) -> int:
    return len(chain.stages) * sum(map(len, chain.options))


def least_overflow(chain: ChainProblem, time_limit_s: float = 10.0) -> Counts | None:
    """Counts that exceed the memory by the fewest bytes, whatever the time; None with too few segments."""
    if chain.num_segments < len(chain.stages):
        return None
    model = _state(chain, overflow=True)
    times = _add_objective(model)
    assert model.overflow is not None
    model.lp.setObjective(times * 1e-12 + model.overflow)
    state = run_solver(model.lp, time_limit_s, most_nodes=MOST_NODES)
    return _read(model) if state.has_solution else None


@dataclass(slots=True, kw_only=True)
class _Model:
    """The MILP while it is being stated."""

    chain: ChainProblem
    lp: pulp.LpProblem
    overflow: pulp.LpVariable | None
    n: list[list[list[pulp.LpVariable]]] = field(default_factory=list)
    uses: list[list[list[pulp.LpVariable]]] = field(default_factory=list)
    holds: list[list[pulp.LpVariable]] = field(default_factory=list)

    def add(self, constraint: pulp.LpConstraint) -> None:
        """One more constraint."""
        self.lp += constraint

    def options(self, stage: int) -> list[tuple[OptionCost, pulp.LpVariable, pulp.LpVariable]]:
        """Every option with its count and use on a stage."""
        return [
            (option, self.n[stage][r][o], self.uses[stage][r][o])
            for r, row in enumerate(self.chain.options)
            for o, option in enumerate(row)
        ]


_GIB = float(2**30)


def _state(chain: ChainProblem, *, overflow: bool) -> _Model:
    lp = pulp.LpProblem("stages", pulp.LpMinimize)
    model = _Model(chain=chain, lp=lp, overflow=lp.add_variable("overflow_gib", 0) if overflow else None)
    _add_counts(model)
    _add_order(model)
    _add_shared(model)
    _add_memory(model)
    return model


def _read(model: _Model) -> Counts:
    return tuple(tuple(tuple(round(v.value()) for v in row) for row in stage) for stage in model.n)


def _add_counts(model: _Model) -> None:
    chain = model.chain
    for s in range(len(chain.stages)):
        model.n.append([
            [model.lp.add_variable(f"n_{s}_{r}_{o}", 0, length, pulp.LpInteger) for o in range(len(chain.options[r]))]
            for r, length in enumerate(chain.lengths)
        ])  # fmt: skip
        size = pulp.lpSum(v for row in model.n[s] for v in row)
        model.add(size >= chain.sizes[0])
        if chain.sizes[1] < chain.num_segments:
            model.add(size <= chain.sizes[1])
    for r, length in enumerate(chain.lengths):
        model.add(pulp.lpSum(v for stage in model.n for v in stage[r]) == length)
    for s, cut in enumerate(chain.cuts or ()):
        model.add(pulp.lpSum(v for stage in model.n[: s + 1] for row in stage for v in row) == cut)


def _add_order(model: _Model) -> None:
    """A run starts on the stages up to s only when the run before it ends there."""
    lengths = model.chain.lengths
    for s in range(len(model.chain.stages) - 1):
        done = [pulp.lpSum(v for stage in model.n[: s + 1] for v in stage[r]) for r in range(len(lengths))]
        for r in range(len(lengths) - 1):
            finished = model.lp.add_variable(f"z_{s}_{r}", 0, 1, pulp.LpBinary)
            model.add(done[r] >= lengths[r] * finished)
            model.add(done[r + 1] <= lengths[r + 1] * finished)


def _add_shared(model: _Model) -> None:
    for s in range(len(model.chain.stages)):
        row = []
        for g, runs in enumerate(model.chain.readers):
            held = model.lp.add_variable(f"h_{s}_{g}", 0, 1, pulp.LpBinary)
            row.append(held)
            for r in runs:
                model.add(pulp.lpSum(model.n[s][r]) <= model.chain.lengths[r] * held)
        model.holds.append(row)


def _add_memory(model: _Model) -> None:
    """Every rank, at every moment that may be its fullest."""
    chain = model.chain
    for s in range(len(chain.stages)):
        model.uses.append([
            [model.lp.add_variable(f"b_{s}_{r}_{o}", 0, 1, pulp.LpBinary) for o in range(len(row))]
            for r, row in enumerate(chain.options)
        ])  # fmt: skip
        for r, row in enumerate(model.uses[s]):
            for n, used in zip(model.n[s][r], row, strict=True):
                model.add(n <= chain.lengths[r] * used)
    limit = chain.memory_bytes / _GIB + (model.overflow if model.overflow is not None else 0)
    for rank, stages in enumerate(chain.ranks):
        transient = model.lp.add_variable(f"transient_{rank}", 0)
        for s in stages:
            for option, _, used in model.options(s):
                model.add(transient >= option.transient_bytes / _GIB * used)
        for moment in chain.in_flight[rank]:
            kept = [_kept(model, s, flying) for s, flying in zip(stages, moment, strict=True)]
            model.add(pulp.lpSum(kept) + transient <= limit)


def _kept(model: _Model, s: int, flying: int) -> pulp.LpAffineExpression:
    """GiB of states and activations of a stage with so many microbatches in flight."""
    chain = model.chain
    held = [g.state_bytes / _GIB * h for g, h in zip(chain.shared, model.holds[s], strict=True)]
    sizes = [(o.state_bytes + flying * o.activation_bytes) / _GIB * n for o, n, _ in model.options(s)]
    return pulp.lpSum(held + sizes) + flying * chain.stages[s].fixed_bytes / _GIB


def _add_objective(model: _Model) -> pulp.LpAffineExpression:
    chain = model.chain
    names = ("T", "B", "E")
    longest, bubble, end = (model.lp.add_variable(name, 0) for name in names)
    times = []
    for stages in chain.ranks:
        time = pulp.lpSum(o.time_us * n for s in stages for o, n, _ in model.options(s))
        time += sum(chain.stages[s].fixed_us for s in stages)
        model.add(longest >= time)
        held = [g.end_us * h for s in stages for g, h in zip(chain.shared, model.holds[s], strict=True)]
        model.add(end >= pulp.lpSum([o.end_us * n for s in stages for o, n, _ in model.options(s)] + held))
        times.append(time)
    model.add(len(chain.ranks) * longest >= pulp.lpSum(times))
    model.add(longest >= least_longest_us(chain))
    for terms in chain.bubble_rows:
        hidden = pulp.lpSum(
            o.hidden_us(terms) * n for s in range(len(chain.stages)) for o, n, _ in model.options(s)
        ) + sum(stage.hidden_us(terms) for stage in chain.stages)
        model.add(bubble >= chain.bubble_share * (pulp.lpSum(times) - longest - hidden))
    total = chain.num_microbatches * longest + bubble + end + chain.constant_us
    model.lp.setObjective(total)
    return total
