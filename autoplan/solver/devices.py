"""The fewest devices of a kind on which a job fits, by solving, and what limits it with fewer.

Devices are tried from one up: powers of two inside a node, then whole nodes. Pins are kept, the data degree follows.
Numbers between the last that is too small and the first that fits are then halved, among those that the batch and the
pins allow; this takes for granted that a job which fits also fits on more devices, as it does where states are shared.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from autoplan.cluster import Cluster
from autoplan.cost import CostModel
from autoplan.errors import InfeasibleError, InputError
from autoplan.ir import SegmentedGraph
from autoplan.plan.outcome import Least, Tried
from autoplan.plan.words import bytes_text, count_text
from autoplan.solver.points import Space, families
from autoplan.solver.remedies import fits, least_overflow, shortfall_of
from autoplan.solver.request import Request
from autoplan.solver.search import search
from autoplan.solver.solve import prepare
from autoplan.solver.tables import Tables

MOST_NODES = 4096
_ANY_GAP = 0.99
"""With it a search ends at its first plan."""


def least_devices(
    sg: SegmentedGraph, cluster: Cluster, cost: CostModel, request: Request, progress: Callable[[str], None]
) -> Least:
    """The smallest cluster of nodes like these on which some plan fits; ``dp`` is left open.

    Raises InfeasibleError when not even ``MOST_NODES`` nodes are enough, or the batch cannot use more devices.
    """
    freed = replace(request, dp=None)
    found: dict[Cluster, Tried] = {}

    def tried(where: Cluster) -> bool:
        if where not in found:
            progress(f"trying {where}")
            found[where] = _try(sg, where, cost, freed, progress)
        return found[where].fits

    last: Cluster | None = None
    for where in sizes(cluster):
        if tried(where):
            between = _between(cluster, last, where)
            least = _halved(sg, cost, freed, between, where, tried)
            ordered = sorted(found.values(), key=lambda each: each.cluster.num_devices)
            return Least(cluster=least, tried=tuple(each for each in ordered if _below(each, least)))
        last = where
        if _too_many(sg, where):
            break
    raise _never(sg, [each for _, each in sorted(found.items(), key=lambda pair: pair[0].num_devices)])


def sizes(cluster: Cluster) -> Iterator[Cluster]:
    """One device, two, four, ..., a node, two nodes, four nodes, ..."""
    per_node, count = cluster.devices_per_node, 1
    while count < per_node:
        yield replace(cluster, num_nodes=1, devices_per_node=count)
        count *= 2
    nodes = 1
    while nodes <= MOST_NODES:
        yield replace(cluster, num_nodes=nodes)
        nodes *= 2


def _between(cluster: Cluster, small: Cluster | None, large: Cluster) -> list[Cluster]:
    """Clusters between two sizes, ascending; the second one is not among them."""
    if small is None:
        return []
    if large.num_nodes > 1:
        return [replace(cluster, num_nodes=nodes) for nodes in range(small.num_nodes + 1, large.num_nodes)]
    counts = range(small.devices_per_node + 1, large.devices_per_node)
    return [replace(cluster, num_nodes=1, devices_per_node=count) for count in counts]


def _halved(
    sg: SegmentedGraph, cost: CostModel, request: Request, between: list[Cluster], large: Cluster,
    tried: Callable[[Cluster], bool],
) -> Cluster:  # fmt: skip
    possible = [where for where in between if _has_mesh(sg, where, cost, request)]
    low, high = 0, len(possible)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if tried(possible[middle]) else (middle + 1, high)
    return possible[low] if low < len(possible) else large


def _has_mesh(sg: SegmentedGraph, where: Cluster, cost: CostModel, request: Request) -> bool:
    try:
        _, space = prepare(sg, where, cost, request)
    except InputError:
        return False
    return next(families(space), None) is not None


def _try(
    sg: SegmentedGraph, where: Cluster, cost: CostModel, request: Request, progress: Callable[[str], None]
) -> Tried:
    try:
        tables, space = prepare(sg, where, cost, request)
        if next(families(space), None) is None:
            return Tried(cluster=where, fits=False, reason="no mesh fits the devices, the batch and what is pinned")
        if fits(tables, space, request) or _any_plan(tables, space, request, progress):
            return Tried(cluster=where, fits=True)
    except InputError as error:
        return Tried(cluster=where, fits=False, reason=str(error))
    nearest = least_overflow(tables, space, request)
    return Tried(cluster=where, fits=False, shortfall=None if nearest is None else shortfall_of(nearest))


def _any_plan(tables: Tables, space: Space, request: Request, progress: Callable[[str], None]) -> bool:
    """Whether a search finds a plan; the first one is enough."""
    first = replace(request, gap=_ANY_GAP, top=1)
    return search(tables, replace(space, request=first), first, progress).best is not None


def _below(each: Tried, least: Cluster) -> bool:
    return each.cluster.num_devices <= least.num_devices


def _too_many(sg: SegmentedGraph, where: Cluster) -> bool:
    """More devices than samples x segments x devices of a node have no further use."""
    return where.num_devices > sg.graph.batch_size * len(sg.segments) * where.devices_per_node


def _never(sg: SegmentedGraph, found: list[Tried]) -> InfeasibleError:
    largest = found[-1]
    nearest = next((each for each in reversed(found) if each.shortfall is not None), largest)
    if nearest.shortfall is None:
        return InfeasibleError(
            f"no number of devices fits: tried up to {largest.cluster}; there, {nearest.reason}", None
        )
    return InfeasibleError(
        f"no number of devices fits: tried up to {largest.cluster}; on {nearest.cluster} stage "
        f"{nearest.shortfall.stage} is still short by {bytes_text(nearest.shortfall.missing_bytes)}. With a batch of "
        f"{count_text(sg.graph.batch_size, 'sample')}, more devices do not help: free what is pinned, lower the length "
        "of the sequence, or take a device with more memory",
        nearest.shortfall,
    )
