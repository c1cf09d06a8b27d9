"""Level 0 as a tree: families of candidates, ways to hold parameters in each, schedules for each of those.

Family    mesh degrees, order of the axes, microbatch
Holding   data mode, data ranks that share states, expert degree, offload
Point     a family, a holding and a schedule
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd

from autoplan.cluster import Cluster
from autoplan.ir import SegmentedGraph
from autoplan.plan.plan import DATA_MODES, MESH_AXES, SCHEDULES, DataMode, ScheduleKind
from autoplan.plan.schedule import allowed
from autoplan.solver.batch import BatchSplit
from autoplan.solver.constraints import Constraints, Value, allows
from autoplan.solver.context import sequence_length
from autoplan.solver.mesh import Degrees, Point, axis_orders, divisors
from autoplan.solver.request import Request
from autoplan.solver.setting import Facts, facts_of

LARGEST_MICROBATCH = 16
MOST_TOKENS = 16_384
"""A microbatch that is not pinned has at most so many positions on a context rank, or is the smallest possible: beyond
that devices are busy, and only memory grows."""
MOST_CHUNKS = 8
FEWEST_POSITIONS = 4096
"""A context axis that is not pinned leaves each rank at least so many positions of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may choose from, before any price."""

    cluster: Cluster
    request: Request
    batch_size: int
    batch_splits: bool
    num_segments: int
    runs: tuple[tuple[int, int], ...]
    """Stretches of one class: the class and its number of segments."""
    tensor_degrees: tuple[int, ...]
    context_degrees: tuple[int, ...]
    num_positions: int
    """Length of the sequence; 0 where there is none."""
    num_experts: int
    """0 for a model without."""
    constraints: Constraints
    facts: Facts
    class_counts: tuple[int, ...]
    """Segments of each class."""

    def allows(self, **values: Value) -> bool:
        """Whether the user forbade none of the values."""
        return not allows(self.constraints, **values)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Family:
    """Mesh and microbatch."""

    degrees: Degrees
    microbatch: int
    num_microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Holding:
    """How data ranks hold parameters."""

    data: DataMode
    shards: int
    expert: int
    offload: bool


def make_space(
    sg: SegmentedGraph,
    split: BatchSplit,
    cluster: Cluster,
    request: Request,
    degrees: tuple[tuple[int, ...], tuple[int, ...]],
    num_experts: int,
    constraints: Constraints,
) -> Space:
    """The space of a job; ``degrees`` are the tensor and the context degrees that the model allows."""
    kinds = [segment.kind for segment in sg.segments]
    return Space(
        cluster=cluster,
        request=request,
        batch_size=sg.graph.batch_size,
        batch_splits=not split.obstacle,
        num_segments=len(kinds),
        runs=tuple((kind, len(list(group))) for kind, group in groupby(kinds)),
        tensor_degrees=degrees[0],
        context_degrees=degrees[1],
        num_positions=sequence_length(sg) or 0,
        num_experts=num_experts,
        constraints=constraints,
        facts=facts_of(sg, request.precision, request.optimizer_states),
        class_counts=tuple(kinds.count(kind) for kind in range(len(sg.kind_names))),
    )


def families(space: Space) -> Iterator[Family]:
    """Every mesh and microbatch that the devices, the batch, the pins and what is forbidden allow."""
    request, devices = space.request, space.cluster.num_devices
    contexts = (1,) if request.runnable else space.context_degrees
    if request.cp is None:
        contexts = tuple(d for d in contexts if d == 1 or space.num_positions >= d * FEWEST_POSITIONS)
    for tp in _allowed(request.tp, space.tensor_degrees):
        for cp in _allowed(request.cp, tuple(d for d in contexts if devices // tp % d == 0)):
            for pp in _allowed(request.pp, divisors(devices // (tp * cp))):
                dp = devices // (tp * cp * pp)
                if pp <= space.num_segments and request.dp in (None, dp) and space.allows(tp=tp, cp=cp, pp=pp, dp=dp):
                    yield from _of_mesh(space, Degrees(pp=pp, dp=dp, cp=cp, tp=tp))


def _of_mesh(space: Space, degrees: Degrees) -> Iterator[Family]:
    batch, pinned = space.batch_size, space.request.microbatch
    if not space.batch_splits:
        if degrees.pp == degrees.dp == 1 and pinned in (None, batch):
            yield Family(degrees=degrees, microbatch=batch, num_microbatches=1)
        return
    if batch % degrees.dp:
        return
    orders = (MESH_AXES,) if space.request.runnable else axis_orders(degrees, space.cluster)
    sizes = microbatches(batch // degrees.dp, pinned)
    few = tuple(size for size in sizes if size * space.num_positions <= MOST_TOKENS * degrees.cp)
    for microbatch in sizes if pinned is not None else few or sizes[:1]:
        count = batch // (degrees.dp * microbatch)
        if count >= degrees.pp and space.allows(microbatch=microbatch):
            for order in orders:
                yield Family(degrees=replace(degrees, order=order), microbatch=microbatch, num_microbatches=count)


def _allowed(pinned: int | None, degrees: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(degree for degree in degrees if pinned in (None, degree))


def microbatches(samples: int, pinned: int | None) -> tuple[int, ...]:
    """Sizes of a microbatch to try for so many samples on a rank: powers of two, and all at once when few."""
    if pinned is not None:
        return (pinned,) if samples % pinned == 0 else ()
    sizes = {2**k for k in range(LARGEST_MICROBATCH.bit_length()) if samples % 2**k == 0}
    if samples <= LARGEST_MICROBATCH:
        sizes.add(samples)
    return tuple(sorted(size for size in sizes if size <= LARGEST_MICROBATCH))


def holdings(space: Space, family: Family) -> Iterator[Holding]:
    """Every way to hold parameters on the data ranks of a family."""
    ranks = family.degrees.data_ranks
    offloads = (False, True) if space.request.offload and space.request.optimizer_states else (False,)
    for expert in _expert_degrees(space, ranks):
        for data, shards in _sharings(space, family):
            for offload in offloads:
                asked = {"data": data, "shards": shards} if ranks > 1 else {}
                if space.allows(**asked, ep=expert, offload=offload):
                    yield Holding(data=data, shards=shards, expert=expert, offload=offload)


def _expert_degrees(space: Space, ranks: int) -> tuple[int, ...]:
    """Divisors of the experts and of the data ranks."""
    if not space.num_experts or space.request.runnable:
        return _allowed(space.request.ep, (1,))
    return _allowed(space.request.ep, divisors(gcd(space.num_experts, ranks)))


def _sharings(space: Space, family: Family) -> Iterator[tuple[DataMode, int]]:
    """Modes with the ranks that share a copy: all of them, or in mode "shard" those of a node (hybrid)."""
    request, ranks = space.request, family.degrees.data_ranks
    if ranks == 1:
        if request.data in (None, "replicate", "shard") and request.shards in (None, 1):
            yield "replicate", 1
        return
    for data in DATA_MODES:
        if request.data not in (None, data) or (request.runnable and data in ("zero1", "zero2")):
            continue
        if data == "replicate":
            if request.shards in (None, 1):
                yield data, 1
            continue
        if request.shards is not None:
            if ranks % request.shards == 0 and request.shards > 1:
                yield data, request.shards
            continue
        yield data, ranks
        in_node = _in_node(space, family)
        if data == "shard" and 1 < in_node < ranks and ranks % in_node == 0 and not request.runnable:
            yield data, in_node


def _in_node(space: Space, family: Family) -> int:
    """Data ranks of a rank's own node."""
    mesh, per_node = family.degrees.mesh, space.cluster.devices_per_node
    return mesh.group("dp", per_node).per_node * mesh.group("cp", per_node).per_node


def schedules(space: Space, family: Family) -> Iterator[tuple[ScheduleKind, int]]:
    """Every schedule, with its chunks, that can run the family's microbatches."""
    request, pp, m = space.request, family.degrees.pp, family.num_microbatches
    for kind in SCHEDULES:
        if request.schedule not in (None, kind) or (kind != "1f1b" and (pp == 1 or request.runnable)):
            continue
        for chunks in _chunk_counts(space, kind, pp):
            fills = m >= (2 * pp - 1 if kind == "zbv" else pp)
            asked = {"schedule": kind, "chunks": chunks} if pp > 1 else {}
            if fills and not allowed(kind, pp, chunks, m) and space.allows(**asked):
                yield kind, chunks


def _chunk_counts(space: Space, kind: ScheduleKind, pp: int) -> tuple[int, ...]:
    """Chunks per rank: powers of two, and what cuts the longest run evenly."""
    wanted, cuts = space.request.chunks, space.request.cuts
    if wanted is None and cuts is not None and (len(cuts) + 1) % pp == 0:
        wanted = (len(cuts) + 1) // pp
    most = space.num_segments // pp if wanted is not None else min(MOST_CHUNKS, space.num_segments // pp)
    if kind == "1f1b":
        counts: tuple[int, ...] = (1,)
    elif kind == "zbv":
        counts = (2,)
    else:
        first, longest = 1 if kind == "zero-bubble" else 2, max(length for _, length in space.runs)
        counts = tuple(v for v in range(first, most + 1) if v & (v - 1) == 0 or longest % (v * pp) == 0)
    if wanted is not None and kind in ("interleaved", "zero-bubble"):
        counts = (wanted,)
    return tuple(v for v in counts if v <= most and wanted in (None, v))


def point_of(family: Family, holding: Holding, schedule: ScheduleKind, chunks: int) -> Point:
    """A leaf of the tree."""
    return Point(
        degrees=family.degrees,
        microbatch=family.microbatch,
        num_microbatches=family.num_microbatches,
        schedule=schedule,
        chunks=chunks,
        data=holding.data,
        shards=holding.shards,
        expert=holding.expert,
        offload=holding.offload,
    )


def all_points(space: Space) -> Iterator[Point]:
    """Every candidate of the space."""
    for family in families(space):
        for holding in holdings(space, family):
            for schedule, chunks in schedules(space, family):
                yield point_of(family, holding, schedule, chunks)
