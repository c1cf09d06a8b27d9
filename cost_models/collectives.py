"""Time of one collective: alpha-beta formulas over the two levels of a cluster.

    n   ranks of the group        S  ``Collective.num_bytes``, the whole buffer
    q   ranks in each node        k  nodes the group touches, n / q
    a   us of one hop, of the slowest level the group uses
    B   bytes per us of one rank inside its node, W the same between nodes

Rings, pairwise exchange and their costs: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH" (2005). Two trees: Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009), as NCCL runs them: chains inside a node, trees between nodes. A ring enters and leaves each
node once per rank it holds (one network port per device), so its nodes exchange at q * W.

Devices use only their own port, so groups side by side do not slow each other down; what else a step does at the same
time makes a collective longer by ``collectives.slowdown``, and none is faster than the host issues it.
"""

import math
from typing import assert_never

from autoplan.cluster import Group
from autoplan.cost import Collective
from autoplan.cost_models.profile import Profile
from autoplan.sharding import CollectiveKind


def collective_us(collective: Collective, profile: Profile) -> float:
    """Microseconds from start to end on the slowest rank; 0 for a group of one or an empty buffer."""
    group, size = collective.group, collective.num_bytes
    assert size >= 0 and 1 <= group.per_node <= group.size, f"not a collective: {collective}"
    if group.size == 1 or size == 0:
        return 0.0
    alone = profile.collective_launch_us + _transfer_us(collective.kind, size, group, profile)
    return max(profile.collective_host_us, profile.collective_slowdown * alone)


def _transfer_us(kind: CollectiveKind, size: int, group: Group, profile: Profile) -> float:
    match kind:
        case CollectiveKind.ALL_REDUCE:
            return all_reduce_us(size, group, profile)
        case CollectiveKind.ALL_GATHER | CollectiveKind.REDUCE_SCATTER:
            return ring_pass_us(size, group, profile)
        case CollectiveKind.ALL_TO_ALL:
            return all_to_all_us(size, group, profile)
        case CollectiveKind.BROADCAST:
            return broadcast_us(size, group, profile)
        case CollectiveKind.SEND | CollectiveKind.RECV:
            return point_to_point_us(size, group, profile)
        case unknown:
            assert_never(unknown)


def ring_pass_us(size: int, group: Group, profile: Profile) -> float:
    """All-gather and reduce-scatter by a ring: (n-1) a + (n-1)/n S / min(B, qW). Thakur et al., section 4.1."""
    steps = group.size - 1
    return steps * _hop_us(group, profile) + steps / group.size * size / _ring_bytes_per_us(group, profile)


def all_reduce_us(size: int, group: Group, profile: Profile) -> float:
    """The fastest of a ring, two trees and, in a node whose switch adds, a sum in the switch; NCCL picks likewise."""
    ring = 2 * ring_pass_us(size, group, profile)
    return min(ring, _tree_us(size, group, profile))


def _tree_us(size: int, group: Group, profile: Profile) -> float:
    """Reduce up, broadcast down, both pipelined: a node's ranks pass S up and S down, a node sends S to each neighbour.

    2 ((q-1) a_node + ceil(log2 k) a_network) + max(2 S / B, min(k - 1, 2) S / (qW)). A switch that adds takes and
    returns S once, and its hop replaces the chain (NVLink SHARP).
    """
    num_nodes = math.ceil(group.size / group.per_node)
    hops = 2 * math.ceil(math.log2(num_nodes)) * profile.network.latency_us
    across = min(num_nodes - 1, 2) * size / (group.per_node * profile.network.bytes_per_us)
    if group.per_node == 1:
        return hops + across
    chain = 2 * (group.per_node - 1) * profile.node.latency_us
    within = 2 * size / profile.node.bytes_per_us
    switch = profile.node.switch_reduce_bytes_per_us
    if switch is not None:
        within = min(within, size / switch)
    return hops + chain + max(within, across)


def all_to_all_us(size: int, group: Group, profile: Profile) -> float:
    """All pairs at once: a + max((q-1)/n S / B, (n-q)/n S / W); each rank uses its links inside and outside at once."""
    within = (group.per_node - 1) / group.size * size / profile.node.bytes_per_us
    across = (group.size - group.per_node) / group.size * size / profile.network.bytes_per_us
    return _hop_us(group, profile) + max(within, across)


def broadcast_us(size: int, group: Group, profile: Profile) -> float:
    """A pipelined ring, as NCCL does it: (n-1) a + S / min(B, qW)."""
    return (group.size - 1) * _hop_us(group, profile) + size / _ring_bytes_per_us(group, profile)


def point_to_point_us(size: int, group: Group, profile: Profile) -> float:
    """One message between two ranks: a + S / B, or S / W when the group crosses nodes.

    Send and receive are two ends of one message and have the same price: count one of them.
    """
    link = profile.network if group.crosses_nodes else profile.node
    return link.latency_us + size / link.bytes_per_us


def _hop_us(group: Group, profile: Profile) -> float:
    """Hop of the slowest level in use: each step of a ring waits for it."""
    if not group.crosses_nodes:
        return profile.node.latency_us
    return max(profile.network.latency_us, profile.node.latency_us if group.per_node > 1 else 0.0)


def _ring_bytes_per_us(group: Group, profile: Profile) -> float:
    """Speed of the slowest link of a ring."""
    within = profile.node.bytes_per_us
    across = group.per_node * profile.network.bytes_per_us
    if not group.crosses_nodes:
        return within
    return across if group.per_node == 1 else min(within, across)
