"""The point of a given plan, taken to a cluster and a batch that may be others than its own.

Kept are pp, cp, tp and ep, the schedule, the samples of a microbatch and how data ranks share. The data degree follows
the devices, and the number of microbatches follows the batch.
"""

from autoplan.cluster import Cluster
from autoplan.errors import InputError
from autoplan.plan.plan import DataMode, Plan
from autoplan.plan.schedule import allowed
from autoplan.plan.words import count_text
from autoplan.solver.mesh import Degrees, Point

_AXES = ("pp", "cp", "tp")


def point_on(plan: Plan, cluster: Cluster, batch_size: int) -> Point:
    """The plan's point on these devices and this batch. Raises InputError naming the degree and what to change."""
    degrees = _degrees(plan, cluster)
    data, shards = _sharing(plan, degrees)
    microbatch = plan.batch_size // plan.parts
    found = Point(
        degrees=degrees,
        microbatch=microbatch,
        num_microbatches=_num_microbatches(batch_size, microbatch, degrees.dp),
        schedule=plan.schedule,
        chunks=plan.chunks,
        data=data,
        shards=shards,
        expert=plan.expert,
        offload=plan.offload,
    )
    _check_schedule(found)
    return found


def moved_words(plan: Plan, point: Point) -> tuple[str, ...]:
    """What had to follow the cluster and the batch, each in words."""
    facts = (
        ("dp", plan.mesh.size("dp"), point.dp),
        ("microbatches", plan.num_microbatches, point.num_microbatches),
        ("data", plan.data, point.data),
        ("data ranks that share a copy of the states", plan.shards, point.shards),
    )
    return tuple(f"{name}: {after} instead of {before}" for name, before, after in facts if before != after)


def _degrees(plan: Plan, cluster: Cluster) -> Degrees:
    pp, cp, tp = (plan.mesh.size(axis) for axis in _AXES)
    devices, per_node = cluster.num_devices, cluster.devices_per_node
    if per_node % tp:
        raise InputError(
            f"the plan has tp={tp}, which stays inside a node, and a node of {cluster} has {per_node} devices: choose "
            f"a cluster with a multiple of {tp} devices a node, or search again"
        )
    if devices % (pp * cp * tp):
        kept = " x ".join(f"{axis}={plan.mesh.size(axis)}" for axis in _AXES if plan.mesh.size(axis) > 1)
        raise InputError(
            f"the plan needs a multiple of {pp * cp * tp} devices ({kept}; dp follows), and {cluster} has {devices}: "
            "choose another cluster, or search again"
        )
    return Degrees(pp=pp, dp=devices // (pp * cp * tp), cp=cp, tp=tp, order=plan.mesh.axes)


def _sharing(plan: Plan, degrees: Degrees) -> tuple[DataMode, int]:
    """Data mode and shards: all data ranks stay all; one data rank shares nothing."""
    ranks = degrees.data_ranks
    if ranks % plan.expert:
        raise InputError(
            f"the plan has ep={plan.expert}, which does not divide the {ranks} data ranks (dp={degrees.dp} x "
            f"cp={degrees.cp}) that are left here: choose another cluster, or search again"
        )
    if ranks == 1 or plan.data == "replicate":
        return "replicate", 1
    shards = ranks if plan.shards == plan.data_ranks else plan.shards
    if ranks % shards:
        raise InputError(
            f"the plan splits states over {shards} of {plan.data_ranks} data ranks, and {shards} does not divide the "
            f"{ranks} that are left here: choose another cluster, or search again"
        )
    return plan.data, shards


def _num_microbatches(batch_size: int, microbatch: int, dp: int) -> int:
    part = microbatch * dp
    if batch_size % part:
        raise InputError(
            f"a global batch of {batch_size} does not divide into microbatches of {count_text(microbatch, 'sample')} "
            f"on dp={dp}: choose a multiple of {part} for --global-batch, or another cluster"
        )
    return batch_size // part


def _check_schedule(point: Point) -> None:
    pp, count = point.pp, point.num_microbatches
    least = 2 * pp - 1 if point.schedule == "zbv" else pp
    reason = allowed(point.schedule, pp, point.chunks, count)
    if not reason and count < least:
        reason = f"pp={pp} is filled by at least {least} microbatches"
    if reason:
        raise InputError(
            f"schedule {point.schedule} cannot run {count_text(count, 'microbatch')} of {point.microbatch} on "
            f"dp={point.dp}: {reason}. Choose another global batch or cluster, or search again"
        )
