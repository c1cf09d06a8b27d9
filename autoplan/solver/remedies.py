"""Nothing fits: which stage is how many bytes short at the nearest point, and what would really make the job fit."""

from collections.abc import Iterator
from dataclasses import replace

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, Shortfall
from autoplan.plan.words import bytes_text
from autoplan.solver.bounds import least_state_bytes
from autoplan.solver.mesh import Point
from autoplan.solver.request import Request
from autoplan.solver.search import all_points, setting_at
from autoplan.solver.step import Step, solve_step
from autoplan.solver.tables import Tables

_POINTS_TRIED = 4
_LARGEST_GROWTH = 64


def infeasible(tables: Tables, request: Request) -> InfeasibleError:
    """The error to raise when no point has a plan."""
    nearest = least_overflow(tables, request)
    if nearest is None:
        return InfeasibleError(
            f"no plan exists for {tables.cluster}: no mesh fits its {tables.cluster.num_devices} devices, the batch of "
            f"{tables.sg.graph.batch_size} and what is pinned ({_pins(request)})"
        )
    stage = max(range(len(nearest.stages)), key=lambda s: nearest.stages[s].memory.total)
    memory = nearest.stages[stage].memory
    shortfall = Shortfall(
        stage=stage,
        needed_bytes=int(memory.total),
        limit_bytes=tables.cluster.memory_bytes,
        by_cause=tuple(sorted(((cause, int(n)) for cause, n in memory), key=lambda pair: -pair[1])),
        remedies=tuple(remedies(tables, request)),
    )
    return InfeasibleError(_message(tables, nearest, shortfall), shortfall)


def _message(tables: Tables, nearest: Step, shortfall: Shortfall) -> str:
    width = max(len(cause) for cause, _ in shortfall.by_cause)
    return "\n".join([
        f"no plan fits {tables.cluster}; the nearest is {nearest.setting.point}, where",
        f"  stage {shortfall.stage} needs  {_exact(shortfall.needed_bytes)}",
        f"  a device has   {_exact(shortfall.limit_bytes)}",
        f"  short by       {_exact(shortfall.missing_bytes)}",
        "what it needs it for:",
        *(f"  {cause:<{width}}  {_exact(num_bytes)}" for cause, num_bytes in shortfall.by_cause if num_bytes),
        "what would make it fit:",
        *(f"  - {way}" for way in shortfall.remedies),
    ])  # fmt: skip


def _exact(num_bytes: int) -> str:
    return f"{bytes_text(num_bytes):>9} ({num_bytes:,} bytes)"


def _pins(request: Request) -> str:
    return ", ".join(f"{name}={value}" for name, value in request.pins) or "nothing"


def least_overflow(tables: Tables, request: Request) -> Step | None:
    """The plan that comes nearest to fitting, among the points whose states are smallest."""

    def least(point: Point) -> tuple[int, int, Point]:
        return least_state_bytes(tables.sg, point, request.optimizer_states), point.microbatch, point

    ordered = sorted(all_points(tables, request), key=least)
    best: Step | None = None
    for point in ordered[:_POINTS_TRIED]:
        table = tables.table(point.tp, point.microbatch, point.tp > 1)
        setting = setting_at(tables, request, point, point.tp > 1)
        step = solve_step(setting, table, 2.0, least_memory=True)
        if isinstance(step, Step) and (best is None or step.overflow_bytes < best.overflow_bytes):
            best = step
        if best is not None and best.overflow_bytes <= 0:
            break
    return best


def fits(tables: Tables, request: Request) -> bool:
    """Whether some plan fits; tries it."""
    step = least_overflow(tables, request)
    return step is not None and step.overflow_bytes <= 0


def remedies(tables: Tables, request: Request) -> Iterator[str]:
    """What would make the job fit, each one tried, cheapest first."""
    for words, freed in (
        ("let recompute be chosen (full keeps the least)", replace(request, recompute=None)),
        ("let the microbatch be smaller", replace(request, microbatch=None)),
        ("let the data axis shard parameters", replace(request, data=None)),
        ("let tp be chosen", replace(request, tp=None)),
        ("let pp be chosen", replace(request, pp=None)),
        ("let dp be chosen", replace(request, dp=None)),
    ):
        if freed != request and fits(replace(tables, recompute=freed.recompute, made={}), freed):
            pin = next(f"{name}={value}" for name, value in request.pins if (name, value) not in freed.pins)
            yield f"{words} instead of pinning {pin}"
    grown = enough_devices(tables, request)
    if grown is not None:
        yield f"{grown.num_devices} devices ({grown})"
    else:
        yield f"a device with more memory than {bytes_text(tables.cluster.memory_bytes)}, or a smaller model"


def enough_devices(tables: Tables, request: Request) -> Cluster | None:
    """The smallest of the doubled clusters on which the job fits, all pins but the data degree kept."""
    freed = replace(request, dp=None)
    cluster = tables.cluster
    while cluster.num_devices < tables.cluster.num_devices * _LARGEST_GROWTH:
        cluster = _doubled(cluster)
        if fits(replace(tables, cluster=cluster, made={}), freed):
            return cluster
    return None


def _doubled(cluster: Cluster) -> Cluster:
    if cluster.num_nodes == 1 and cluster.devices_per_node < 8:
        return replace(cluster, devices_per_node=cluster.devices_per_node * 2)
    return replace(cluster, num_nodes=cluster.num_nodes * 2)
