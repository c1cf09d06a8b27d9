"""Nothing fits: which stage is how many bytes short at the nearest point, and what would really make the job fit."""

import heapq
from collections.abc import Iterator
from dataclasses import replace

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, Shortfall
from autoplan.plan.plan import RECOMPUTE
from autoplan.plan.words import bytes_text
from autoplan.solver.bounds import least_state_bytes
from autoplan.solver.mesh import Point, groups_of
from autoplan.solver.points import Family, Space, families, holdings, point_of, schedules
from autoplan.solver.pricing import setting_at
from autoplan.solver.request import Request
from autoplan.solver.step import Step, nearest_step, price_runs, run_params
from autoplan.solver.tables import TableKey, Tables

_NODE = 8
_POINTS_TRIED = 4
_LARGEST_GROWTH = 64


def infeasible(tables: Tables, space: Space, request: Request) -> InfeasibleError:
    """The error to raise when no point has a plan."""
    nearest = least_overflow(tables, space, request)
    if nearest is None:
        return InfeasibleError(
            f"no plan exists for {tables.cluster}: no mesh fits its {tables.cluster.num_devices} devices, the batch of "
            f"{tables.sg.graph.batch_size} and what is pinned ({_pins(request)})"
        )
    shortfall = shortfall_of(nearest, tuple(remedies(tables, space, request)))
    return InfeasibleError(_message(tables, nearest, shortfall), shortfall)


def shortfall_of(step: Step, ways: tuple[str, ...] = ()) -> Shortfall:
    """What the fullest place of a step needs; ``ways`` would make it fit."""
    stage = max(range(len(step.memory)), key=lambda rank: step.memory[rank].total)
    memory = step.memory[stage]
    return Shortfall(
        stage=stage,
        needed_bytes=int(memory.total),
        limit_bytes=step.setting.cluster.memory_bytes,
        by_cause=tuple(sorted(((cause, int(n)) for cause, n in memory), key=lambda pair: -pair[1])),
        remedies=ways,
    )


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
    return ", ".join(f"{name}={value}" for name, value in request.pinned) or "nothing"


def least_overflow(tables: Tables, space: Space, request: Request) -> Step | None:
    """The plan that comes nearest to fitting, among the points whose states are smallest."""
    best: Step | None = None
    for point in _smallest(tables, space, request):
        step = _nearest(tables, space, request, point)
        if step is not None and (best is None or step.overflow_bytes < best.overflow_bytes):
            best = step
        if best is not None and best.overflow_bytes <= 0:
            break
    return best


def _smallest(tables: Tables, space: Space, request: Request) -> list[Point]:
    """The points to try, one per family, smallest states first, then smallest microbatch."""
    found: dict[Family, tuple[int, int, int, Point]] = {}
    for family in families(space):
        ways = list(schedules(space, family))
        for holding in holdings(space, family) if ways else ():
            point = point_of(family, holding, *ways[0])
            least = least_state_bytes(space.facts, point)
            tokens = point.microbatch * (1024 // point.cp) // point.tp
            mine = (least, tokens, point.pp, point)
            if family not in found or mine[:3] < found[family][:3]:
                found[family] = mine
    return [entry[3] for entry in heapq.nsmallest(_POINTS_TRIED, found.values())]


def _nearest(tables: Tables, space: Space, request: Request, point: Point) -> Step | None:
    groups = groups_of(point, tables.cluster)
    key = TableKey(
        tp=point.tp,
        cp=point.cp,
        cp_per_node=groups.context.per_node,
        microbatch=point.microbatch,
        sequence=point.tp > 1,
    )
    table = tables.table(key)
    setting = setting_at(tables, space.facts, point, table)
    cuts = request.cuts if request.cuts is not None and len(request.cuts) == point.num_stages - 1 else None
    return nearest_step(setting, price_runs(setting, table, run_params(setting.sg, point.num_stages)), cuts)


def fits(tables: Tables, space: Space, request: Request) -> bool:
    """Whether some plan fits; tries it."""
    step = least_overflow(tables, space, request)
    return step is not None and step.overflow_bytes <= 0


def remedies(tables: Tables, space: Space, request: Request) -> Iterator[str]:
    """What would make the job fit, each one tried, cheapest first."""
    for words, freed in (
        ("let recompute be chosen (full keeps the least)", replace(request, recompute=None)),
        ("let the microbatch be smaller", replace(request, microbatch=None)),
        ("let the data axis shard parameters", replace(request, data=None, shards=None)),
        ("let the schedule be chosen", replace(request, schedule=None, chunks=None)),
        ("let cp be chosen", replace(request, cp=None)),
        ("let ep be chosen", replace(request, ep=None)),
        ("let tp be chosen", replace(request, tp=None)),
        ("let pp be chosen", replace(request, pp=None)),
        ("let dp be chosen", replace(request, dp=None)),
    ):
        if freed.pinned != request.pinned and fits(_freed(tables, freed), replace(space, request=freed), freed):
            pin = next(f"{name}={value}" for name, value in request.pinned if (name, value) not in freed.pinned)
            yield f"{words} instead of pinning {pin}"
    if not request.offload and request.optimizer_states:
        offloaded = replace(request, offload=True)
        if fits(tables, replace(space, request=offloaded), offloaded):
            yield "allow optimizer states in host memory (--offload)"
    grown = enough_devices(tables, space, request)
    if grown is not None:
        yield f"{grown.num_devices} devices ({grown})"
    else:
        yield f"a device with more memory than {bytes_text(tables.cluster.memory_bytes)}, or a smaller model"


def _freed(tables: Tables, request: Request) -> Tables:
    """Tables without the pinned way to recompute."""
    if request.recompute is not None:
        return tables
    return replace(tables, recompute=RECOMPUTE, made={})


def enough_devices(tables: Tables, space: Space, request: Request) -> Cluster | None:
    """The smallest of the doubled clusters on which the job fits, all pins but the data degree kept."""
    freed = replace(request, dp=None)
    cluster = tables.cluster
    while cluster.num_devices < tables.cluster.num_devices * _LARGEST_GROWTH:
        cluster = _doubled(cluster)
        if fits(replace(tables, cluster=cluster, made={}), replace(space, cluster=cluster, request=freed), freed):
            return cluster
    return None


def _doubled(cluster: Cluster) -> Cluster:
    if cluster.num_nodes == 1 and cluster.devices_per_node < _NODE:
        return replace(cluster, devices_per_node=cluster.devices_per_node * 2)
    return replace(cluster, num_nodes=cluster.num_nodes * 2)
