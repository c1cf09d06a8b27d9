"""Pinned degrees of the mesh and what data ranks share: each must divide what it splits, together the devices."""

import math

from autoplan.cluster import Cluster
from autoplan.errors import InputError
from autoplan.plan.plan import MESH_AXES
from autoplan.solver.mesh import divisors
from autoplan.solver.request import Request


def listed(values: tuple[int, ...]) -> str:
    """``1, 2, 4``."""
    return ", ".join(map(str, values))


def pinned_degrees(request: Request) -> dict[str, int]:
    """The axes whose degree is pinned, outermost first."""
    degrees = {axis: getattr(request, axis) for axis in MESH_AXES}
    return {axis: degree for axis, degree in degrees.items() if degree is not None}


def pipeline_room(cluster: Cluster, request: Request) -> int:
    """The longest pipeline that the other pinned degrees leave room for; the pinned one where it is pinned."""
    return request.pp or cluster.num_devices // math.prod(pinned_degrees(request).values())


def _named(degrees: dict[str, int]) -> str:
    return " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())


def check_degrees(cluster: Cluster, request: Request, context_degrees: tuple[int, ...]) -> None:
    """Every pinned degree can be, and so can all of them together."""
    devices, pinned = cluster.num_devices, pinned_degrees(request)
    for axis, degree in pinned.items():
        if devices % degree:
            valid = listed(divisors(devices))
            raise InputError(f"{axis}={degree} does not divide the {devices} devices of {cluster}; valid: {valid}")
    if request.tp is not None and cluster.devices_per_node % request.tp:
        raise InputError(
            f"tp={request.tp} does not fit a node of {cluster.devices_per_node} devices; tensor parallelism stays "
            f"inside a node, valid: {listed(divisors(cluster.devices_per_node))}"
        )
    if request.cp is not None and request.cp not in context_degrees:
        raise InputError(f"cp={request.cp} does not split the sequence of this model; valid: {listed(context_degrees)}")
    _check_product(cluster, pinned, context_degrees)


def _check_product(cluster: Cluster, pinned: dict[str, int], context_degrees: tuple[int, ...]) -> None:
    devices, product = cluster.num_devices, math.prod(pinned.values())
    fixed = pinned | _forced(context_degrees)
    if devices % product or (len(fixed) == len(MESH_AXES) and product != devices):
        raise InputError(
            f"{_named(pinned)} makes {product}, but {cluster} has {devices} devices; the degrees must multiply to "
            f"{devices}: leave one of them out"
        )
    if "cp" not in fixed and len(fixed) == len(MESH_AXES) - 1 and devices // product not in context_degrees:
        raise InputError(
            f"{_named(pinned)} leaves cp={devices // product} on the {devices} devices of {cluster}, which does not "
            f"split the sequence of this model; valid: {listed(context_degrees)}"
        )


def _forced(context_degrees: tuple[int, ...]) -> dict[str, int]:
    """The context degree where there is no choice."""
    return {"cp": context_degrees[0]} if len(context_degrees) == 1 else {}


def check_experts(
    cluster: Cluster, request: Request, context_degrees: tuple[int, ...], num_experts: int
) -> None:  # fmt: skip
    """A pinned expert degree divides the experts and the data ranks."""
    ep = request.ep
    if ep is None or ep == 1:
        return
    if num_experts == 0:
        raise InputError(f"ep={ep} needs a mixture of experts, and this model has none; leave ep out")
    if num_experts % ep:
        raise InputError(f"ep={ep} does not divide the {num_experts} experts; valid: {listed(divisors(num_experts))}")
    ranks = _data_ranks(cluster, request, context_degrees)
    if all(count % ep for count in ranks):
        valid = tuple(degree for degree in _parts(ranks) if num_experts % degree == 0)
        raise InputError(f"ep={ep} {_no_part(ranks, request)}; valid: {listed(valid)}")


def check_shards(cluster: Cluster, request: Request, context_degrees: tuple[int, ...]) -> None:
    """Pinned shards divide the data ranks and agree with a pinned data mode."""
    shards, data = request.shards, request.data
    if shards is None:
        return
    ranks = _data_ranks(cluster, request, context_degrees)
    if all(count % shards for count in ranks):
        raise InputError(f"shards={shards} {_no_part(ranks, request)}; valid: {listed(_parts(ranks))}")
    if data == "replicate" and shards > 1:
        raise InputError(
            f"shards={shards} splits states over data ranks, and data=replicate splits none: leave one of them out, or "
            "pin data=zero1, zero2 or shard"
        )
    if data not in (None, "replicate") and shards == 1:
        raise InputError(
            f"shards=1 splits no states, and data={data} does: leave one of them out, or pin data=replicate"
        )


def _data_ranks(cluster: Cluster, request: Request, context_degrees: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of data ranks (dp x cp) that the pinned degrees allow, ascending."""
    devices = cluster.num_devices
    others = (request.pp or 1) * (request.tp or 1)
    full = request.pp is not None and request.tp is not None
    found = {
        dp * cp
        for dp in ((request.dp,) if request.dp else divisors(devices))
        for cp in ((request.cp,) if request.cp else context_degrees)
        if devices % (dp * cp * others) == 0 and (not full or dp * cp * others == devices)
    }
    return tuple(sorted(found))


def _parts(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({part for count in ranks for part in divisors(count)}))


def _no_part(ranks: tuple[int, ...], request: Request) -> str:
    pinned = pinned_degrees(request)
    given = f" with {_named(pinned)}" if pinned else ""
    return f"does not divide the data ranks (dp x cp), of which there can be {listed(ranks)}{given}"
