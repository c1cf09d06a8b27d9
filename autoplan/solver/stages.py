"""Cutting the chain into pipeline stages and choosing an option per segment, as a MILP over counts.

A *run* is a stretch of consecutive segments of one class; an *option* is one way to run a segment of it.

Variables
    n[s, r, o]   segments of run r that stage s runs by option o; integer          (_add_counts)
    z[s, r]      stages 0..s together finish run r; binary                         (_add_order)
    b[s, r, o]   stage s uses the option at all; binary                            (_add_memory)
    h[s, g]      stage s holds the shared parameter g                              (_add_shared)
    T, E         longest stage of one microbatch, longest work at the end of a step
Objective
    (m - 1) T + sum of the stages' times + E

A pipeline of m microbatches takes that long when every stage is as fast as the slowest. docs/formulation.md has the
mathematics.
"""

from dataclasses import dataclass, field

import pulp

from autoplan.solver.milp import SolveState, run_solver


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCost:
    """What one segment costs by one option, on one device."""

    time_us: float
    """Forward and backward of one microbatch, all exposed communication included."""
    end_us: float
    """Once a step: gradient sums and the optimizer."""
    state_bytes: int
    """Parameters, gradients and optimizer states, without shared parameters."""
    activation_bytes: int
    """Per microbatch in flight."""
    transient_bytes: int
    """While it runs; the largest of a stage counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedParam:
    """A parameter that several classes read; every stage that reads it holds it."""

    state_bytes: int
    end_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimits:
    """What differs between stages before any segment is placed."""

    in_flight: int
    """Microbatches whose activations are alive at the peak."""
    fixed_us: float
    """Per microbatch: sends and receives."""
    fixed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainProblem:
    """Runs, options per run and limits per stage."""

    lengths: tuple[int, ...]
    options: tuple[tuple[OptionCost, ...], ...]
    stages: tuple[StageLimits, ...]
    num_microbatches: int
    memory_bytes: int
    shared: tuple[SharedParam, ...] = ()
    readers: tuple[tuple[int, ...], ...] = ()
    """Per shared parameter: the runs that read it."""

    def shared_of(self, run: int) -> tuple[int, ...]:
        """Shared parameters a run reads."""
        return tuple(g for g, runs in enumerate(self.readers) if run in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSolution:
    """The end of one solve. ``counts[s][r][o]`` segments; there when the state is OPTIMAL or FEASIBLE."""

    state: SolveState
    counts: tuple[tuple[tuple[int, ...], ...], ...] | None
    objective_us: float
    overflow_bytes: int = 0
    """Bytes by which the fullest stage exceeds the limit; above 0 only where an overflow was allowed."""


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


def solve_stages(
    chain: ChainProblem,
    *,
    time_limit_s: float = 5.0,
    gap: float = 0.0,
    least_memory: bool = False,
    cutoff_us: float | None = None,
) -> ChainSolution:
    """Best cut and options. ``least_memory`` minimises the bytes above the limit instead, and so never fails.

    Deterministic. INFEASIBLE when there are fewer segments than stages or no choice fits the memory; BEATEN, with a
    lower bound as objective, when nothing is faster than ``cutoff_us``.
    """
    if sum(chain.lengths) < len(chain.stages):
        return ChainSolution(state=SolveState.INFEASIBLE, counts=None, objective_us=float("inf"))
    lp = pulp.LpProblem("stages", pulp.LpMinimize)
    overflow = lp.add_variable("overflow_gib", 0) if least_memory else None
    model = _Model(chain=chain, lp=lp, overflow=overflow)
    _add_counts(model)
    _add_order(model)
    _add_shared(model)
    _add_memory(model)
    times = _add_objective(model)
    if cutoff_us is not None:
        relaxed = run_solver(lp, time_limit_s, relaxed=True)
        bound = float(pulp.value(times)) if relaxed.has_solution else 0.0
        if bound >= cutoff_us:
            return ChainSolution(state=SolveState.BEATEN, counts=None, objective_us=bound)
        model.add(times <= cutoff_us)
    state = run_solver(lp, time_limit_s, gap)
    if state is SolveState.INFEASIBLE and cutoff_us is not None and relaxed.has_solution:
        return ChainSolution(state=SolveState.BEATEN, counts=None, objective_us=cutoff_us)
    if not state.has_solution:
        return ChainSolution(state=state, counts=None, objective_us=float("inf"))
    counts = tuple(tuple(tuple(round(v.value()) for v in row) for row in stage) for stage in model.n)
    over = round(overflow.value() * _GIB) if overflow is not None else 0
    return ChainSolution(state=state, counts=counts, objective_us=float(pulp.value(times)), overflow_bytes=over)


def _add_counts(model: _Model) -> None:
    chain = model.chain
    for s in range(len(chain.stages)):
        model.n.append([
            [model.lp.add_variable(f"n_{s}_{r}_{o}", 0, length, pulp.LpInteger) for o in range(len(chain.options[r]))]
            for r, length in enumerate(chain.lengths)
        ])  # fmt: skip
        model.add(pulp.lpSum(v for row in model.n[s] for v in row) >= 1)
    for r, length in enumerate(chain.lengths):
        model.add(pulp.lpSum(v for stage in model.n for v in stage[r]) == length)


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
    chain = model.chain
    limit = chain.memory_bytes / _GIB + (model.overflow if model.overflow is not None else 0)
    for s, stage in enumerate(chain.stages):
        model.uses.append([
            [model.lp.add_variable(f"b_{s}_{r}_{o}", 0, 1, pulp.LpBinary) for o in range(len(row))]
            for r, row in enumerate(chain.options)
        ])  # fmt: skip
        held = [g.state_bytes / _GIB * h for g, h in zip(chain.shared, model.holds[s], strict=True)]
        live = pulp.lpSum(
            [(o.state_bytes + stage.in_flight * o.activation_bytes) / _GIB * n for o, n, _ in model.options(s)] + held
        )
        transient = model.lp.add_variable(f"transient_{s}", 0)
        for r, row in enumerate(model.uses[s]):
            for n, used in zip(model.n[s][r], row, strict=True):
                model.add(n <= chain.lengths[r] * used)
        for option, _, used in model.options(s):
            model.add(transient >= option.transient_bytes / _GIB * used)
        model.add(live + transient + stage.fixed_bytes / _GIB <= limit)


def _add_objective(model: _Model) -> pulp.LpAffineExpression:
    chain = model.chain
    longest, end = model.lp.add_variable("T", 0), model.lp.add_variable("E", 0)
    times = []
    for s, stage in enumerate(chain.stages):
        time = pulp.lpSum(o.time_us * n for o, n, _ in model.options(s)) + stage.fixed_us
        model.add(longest >= time)
        shared = [g.end_us * h for g, h in zip(chain.shared, model.holds[s], strict=True)]
        model.add(end >= pulp.lpSum([o.end_us * n for o, n, _ in model.options(s)] + shared))
        times.append(time)
    model.add(len(chain.stages) * longest >= pulp.lpSum(times))
    model.add(longest >= least_longest_us(chain))
    total = (chain.num_microbatches - 1) * longest + pulp.lpSum(times) + end
    scale = 1e-12 if model.overflow is not None else 1.0
    model.lp.setObjective(total * scale + (model.overflow if model.overflow is not None else 0))
    return total


def least_longest_us(chain: ChainProblem) -> float:
    """Lower bound on the longest stage: the best contiguous cut when every segment takes its fastest option.

    It closes most of the gap that the relaxation leaves by cutting segments into fractions.
    """
    times = [min(o.time_us for o in row) for row, n in zip(chain.options, chain.lengths, strict=True) for _ in range(n)]
    fixed = min(stage.fixed_us for stage in chain.stages)
    low, high = max(*times, sum(times) / len(chain.stages)), sum(times)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _num_stages(times, middle) <= len(chain.stages) else (middle, high)
    return low + fixed


def _num_stages(times: list[float], limit: float) -> int:
    count, used = 1, 0.0
    for time in times:
        if used + time > limit:
            count, used = count + 1, 0.0
        used += time
    return count
