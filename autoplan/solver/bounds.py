"""Level 0: every point of the search, and what none of its plans can beat.

The bound of a point: compute of the whole model split evenly over pipeline and tensor ranks, the bubble, the sends
between stages, and summing whole gradients over the data axis. Memory: the states of all parameters split evenly.
"""

from collections.abc import Iterator

from autoplan.cluster import Cluster
from autoplan.cost import Collective
from autoplan.ir import SegmentedGraph
from autoplan.plan.memory import ParamBytes, state_causes
from autoplan.plan.plan import DataMode
from autoplan.sharding import CollectiveKind
from autoplan.solver.mesh import Point, divisors
from autoplan.solver.request import Request
from autoplan.solver.tables import Tables

LARGEST_MICROBATCH = 16


def points(
    request: Request, cluster: Cluster, batch_size: int, num_segments: int, tensor_degrees: tuple[int, ...]
) -> Iterator[Point]:
    """Every point that the pins, the devices and the batch allow, in a fixed order."""
    devices = cluster.num_devices
    for tp in _allowed(request.tp, tensor_degrees):
        for pp in _allowed(request.pp, divisors(devices // tp)):
            dp = devices // (tp * pp)
            if pp > num_segments or request.dp not in (None, dp) or batch_size % dp:
                continue
            for microbatch in microbatches(batch_size // dp, request.microbatch):
                if batch_size // (dp * microbatch) < pp:
                    continue  # 1F1B needs a microbatch for every stage
                for data in _data_modes(request, dp):
                    yield Point(
                        pp=pp, dp=dp, tp=tp, microbatch=microbatch, data=data,
                        num_microbatches=batch_size // (dp * microbatch),
                    )  # fmt: skip


def _allowed(pinned: int | None, degrees: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(degree for degree in degrees if pinned in (None, degree))


def _data_modes(request: Request, dp: int) -> tuple[DataMode, ...]:
    if request.data is not None:
        return (request.data,)
    return ("replicate", "shard") if dp > 1 else ("replicate",)


def microbatches(samples: int, pinned: int | None) -> tuple[int, ...]:
    """Sizes of a microbatch to try for so many samples on a rank: powers of two, and all at once when few."""
    if pinned is not None:
        return (pinned,) if samples % pinned == 0 else ()
    sizes = {2**k for k in range(LARGEST_MICROBATCH.bit_length()) if samples % 2**k == 0}
    if samples <= LARGEST_MICROBATCH:
        sizes.add(samples)
    return tuple(sorted(size for size in sizes if size <= LARGEST_MICROBATCH))


def lower_bound_us(tables: Tables, point: Point, segment_us: tuple[float, ...]) -> float:
    """A time that no plan at this point beats. ``segment_us``: forward and backward of each class on one device."""
    sg, cost = tables.sg, tables.cost
    times = [segment_us[segment.kind] / point.tp for segment in sg.segments]
    total = sum(times)
    stage = max(total / point.pp, *times)
    groups = point.groups(tables.cluster)
    end = 0.0
    if point.dp > 1 and point.data == "replicate":
        num_bytes = total_params(sg).trainable // (point.pp * point.tp)
        end = cost.collective_us(Collective(kind=CollectiveKind.ALL_REDUCE, num_bytes=num_bytes, group=groups.data))
    return (point.num_microbatches - 1) * stage + total + end


def class_us(tables: Tables, microbatch: int) -> tuple[float, ...]:
    """Forward and backward of a segment of each class on one device, nothing recomputed unless pinned so."""
    table = tables.table(1, microbatch, False)
    return tuple(min(o.cost.forward_us + o.cost.backward_us for o in row) for row in table.options)


def least_state_bytes(sg: SegmentedGraph, point: Point, optimizer_states: int) -> int:
    """Bytes that the states of all parameters need on the fullest device, however they are split."""
    whole = total_params(sg)
    parts = point.pp * point.tp
    even = ParamBytes(
        whole=whole.whole // parts,
        trainable=whole.trainable // parts,
        kept=whole.whole // (parts * point.dp),
        kept_trainable=whole.trainable // (parts * point.dp),
    )
    return sum(state_causes(even, point.data_axis, optimizer_states))


def total_params(sg: SegmentedGraph) -> ParamBytes:
    """All parameters that the chain reads, each once."""
    used = {name for segment in sg.segments for name in segment.params}
    read = [param for param in sg.graph.params if param.value in used]
    whole = sum(param.meta.num_bytes for param in read)
    trainable = sum(param.meta.num_bytes for param in read if param.trainable)
    return ParamBytes(whole=whole, trainable=trainable, kept=whole, kept_trainable=trainable)
