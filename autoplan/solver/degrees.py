"""Which degrees a model, a cluster and a batch allow, each with its reason: what to know before any search."""

from autoplan.cluster import Cluster
from autoplan.ir import SegmentedGraph
from autoplan.plan.words import count_text
from autoplan.solver.batch import BatchSplit, split_batch
from autoplan.solver.context import context_degrees, obstacle, sequence_length
from autoplan.solver.experts import num_experts
from autoplan.solver.mesh import divisors
from autoplan.solver.pins import attention_heads, tensor_degrees
from autoplan.solver.pins_degrees import listed


def valid_degrees(sg: SegmentedGraph, cluster: Cluster) -> tuple[tuple[str, str], ...]:
    """Per axis: ``1, 2: they divide a node of 8 devices and 2 heads``."""
    split = split_batch(sg)
    return (
        ("tp", _tensor(sg, cluster)),
        ("cp", _context(sg, split, cluster)),
        ("ep", _experts(sg)),
        ("pp", _pipeline(sg, split, cluster)),
        ("dp", _data(sg, split, cluster)),
    )


def _tensor(sg: SegmentedGraph, cluster: Cluster) -> str:
    node = f"divide a node of {count_text(cluster.devices_per_node, 'device')}"
    heads = attention_heads(sg.graph)
    if not heads:
        return f"{listed(tensor_degrees(sg, cluster))}: they {node}; there is no attention head to split"
    return f"{listed(tensor_degrees(sg, cluster))}: they {node} and {listed(heads)} attention heads (query, key-value)"


def _context(sg: SegmentedGraph, split: BatchSplit, cluster: Cluster) -> str:
    reason = obstacle(sg, split)
    if reason:
        return f"1: {reason}"
    pieces = f"each device gets two equal pieces of the {sequence_length(sg)} positions, and they divide the devices"
    return f"{listed(context_degrees(sg, split, cluster))}: {pieces}"


def _experts(sg: SegmentedGraph) -> str:
    count = num_experts(sg)
    if not count:
        return "1: the model has no experts"
    return f"{listed(divisors(count))}: they divide the {count} experts, and must divide the data ranks (dp x cp)"


def _pipeline(sg: SegmentedGraph, split: BatchSplit, cluster: Cluster) -> str:
    if split.obstacle:
        return f"1: the batch cannot be cut into microbatches ({split.obstacle})"
    most = min(len(sg.segments), sg.graph.batch_size)
    valid = tuple(degree for degree in divisors(cluster.num_devices) if degree <= most)
    return (
        f"{listed(valid)}: they divide the {count_text(cluster.num_devices, 'device')}; every stage needs one of the "
        f"{len(sg.segments)} segments, and a microbatch per stage"
    )


def _data(sg: SegmentedGraph, split: BatchSplit, cluster: Cluster) -> str:
    batch = sg.graph.batch_size
    if split.obstacle:
        return f"1: the batch cannot be split ({split.obstacle})"
    valid = tuple(degree for degree in divisors(cluster.num_devices) if batch % degree == 0)
    return f"{listed(valid)}: they divide the {count_text(cluster.num_devices, 'device')} and the batch of {batch}"
