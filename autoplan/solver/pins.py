"""Refuse, before any search, what cannot be: degrees and microbatches that do not divide, heads that would be split."""

import math

from autoplan.cluster import Cluster
from autoplan.errors import InputError
from autoplan.ir import Graph, OpNode, SegmentedGraph
from autoplan.solver.batch import BatchSplit
from autoplan.solver.mesh import divisors
from autoplan.solver.request import Request
from autoplan.solver.work import ATTENTION_OPS

_SAME_HEADS = frozenset(
    f"aten.{name}" for name in ("reshape.default", "view.default", "expand.default", "contiguous.default",
                                "clone.default", "_unsafe_view.default", "unsqueeze.default", "slice.Tensor")
)  # fmt: skip


def check_pins(sg: SegmentedGraph, split: BatchSplit, cluster: Cluster, request: Request) -> None:
    """Raise InputError naming the pin and its valid values."""
    _check_degrees(sg, cluster, request)
    _check_heads(sg.graph, cluster, request)
    _check_batch(sg.graph.batch_size, split, cluster, request)


def tensor_degrees(sg: SegmentedGraph, cluster: Cluster) -> tuple[int, ...]:
    """Tensor degrees that stay inside a node, divide the devices and split no attention head."""
    heads = [count for node in _attention(sg.graph) for count in head_counts(sg.graph, node)]
    return tuple(
        degree
        for degree in divisors(cluster.num_devices)
        if cluster.devices_per_node % degree == 0 and all(count % degree == 0 for count in heads)
    )


def head_counts(graph: Graph, node: OpNode) -> tuple[int, int]:
    """Query heads and key heads of an attention op, the latter before they were repeated to match."""
    query, key = node.operands[:2]
    if len(graph.metas[query].shape) != 4:
        return 1, 1
    key_heads = graph.metas[key].shape[1]
    while key in graph.node_of:
        key_heads = min(key_heads, graph.metas[key].shape[1])
        if graph.node_of[key].op not in _SAME_HEADS:
            break
        key = graph.node_of[key].operands[0]
    return graph.metas[query].shape[1], key_heads


def _attention(graph: Graph) -> list[OpNode]:
    return [node for node in graph.nodes if node.op in ATTENTION_OPS]


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))


def _check_degrees(sg: SegmentedGraph, cluster: Cluster, request: Request) -> None:
    devices = cluster.num_devices
    degrees = {"pp": request.pp, "dp": request.dp, "tp": request.tp}
    pinned = {name: degree for name, degree in degrees.items() if degree is not None}
    for name, degree in pinned.items():
        if devices % degree:
            raise InputError(
                f"{name}={degree} does not divide the {devices} devices of {cluster}; "
                f"valid: {_listed(divisors(devices))}"
            )
    product = math.prod(pinned.values())
    if devices % product or (len(pinned) == 3 and product != devices):
        names = " x ".join(f"{name}={degree}" for name, degree in pinned.items())
        raise InputError(
            f"{names} makes {product}, but {cluster} has {devices} devices; the degrees must multiply to {devices}: "
            "leave one of them out"
        )
    if request.tp is not None and cluster.devices_per_node % request.tp:
        valid = _listed(divisors(cluster.devices_per_node))
        raise InputError(
            f"tp={request.tp} does not fit a node of {cluster.devices_per_node} devices; tensor parallelism stays "
            f"inside a node, valid: {valid}"
        )
    if request.pp is not None and request.pp > len(sg.segments):
        raise InputError(f"pp={request.pp} needs as many segments, the model has {len(sg.segments)}; use at most that")


def _check_heads(graph: Graph, cluster: Cluster, request: Request) -> None:
    tp = request.tp
    if tp is None or tp == 1:
        return
    for node in _attention(graph):
        queries, keys = head_counts(graph, node)
        if queries % tp or keys % tp:
            common = math.gcd(queries, keys)
            valid = tuple(d for d in divisors(cluster.devices_per_node) if common % d == 0)
            raise InputError(
                f"tp={tp} would split an attention head: {node.where} has {queries} query heads and {keys} key-value "
                f"heads, and tp must divide both; valid: {_listed(valid)}"
            )


def _check_batch(batch: int, split: BatchSplit, cluster: Cluster, request: Request) -> None:
    splits = request.dp not in (None, 1) or request.pp not in (None, 1) or request.microbatch not in (None, batch)
    if split.obstacle and splits:
        raise InputError(f"the batch cannot be split: {split.obstacle}. Use pp=1, dp=1 and microbatch={batch}")
    if request.dp is not None and batch % request.dp:
        valid = tuple(d for d in divisors(cluster.num_devices) if batch % d == 0)
        raise InputError(f"dp={request.dp} does not divide the batch of {batch}; valid: {_listed(valid)}")
    if request.pp is not None and request.pp > batch // (request.dp or 1) // (request.microbatch or 1):
        raise InputError(
            f"pp={request.pp} needs at least as many microbatches, but a batch of {batch} over dp={request.dp or 1} in "
            f"microbatches of {request.microbatch or 1} gives fewer: raise the batch, or lower pp, dp or microbatch"
        )
    if request.microbatch is not None:
        samples = batch // (request.dp or 1)
        if samples % request.microbatch:
            raise InputError(
                f"microbatch={request.microbatch} does not divide the {samples} samples of a data-parallel rank; "
                f"valid: {_listed(divisors(samples))}"
            )
