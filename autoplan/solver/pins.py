"""Refuse, before any search, what cannot be: degrees and microbatches that do not divide, heads that would be split.

``pins_degrees.py`` has the rules for the mesh and the data ranks, ``pins_pipeline.py`` those for schedules and cuts.
"""

import math

from autoplan.cluster import Cluster
from autoplan.errors import InputError
from autoplan.ir import Graph, OpNode, SegmentedGraph
from autoplan.solver.batch import BatchSplit
from autoplan.solver.mesh import divisors
from autoplan.solver.pins_degrees import check_degrees, check_experts, check_shards, listed
from autoplan.solver.pins_pipeline import check_cuts, check_schedule
from autoplan.solver.request import Request
from autoplan.solver.work import ATTENTION_OPS

_SAME_HEADS = frozenset(
    f"aten.{name}" for name in ("reshape.default", "view.default", "expand.default", "contiguous.default",
                                "clone.default", "_unsafe_view.default", "unsqueeze.default", "slice.Tensor")
)  # fmt: skip


def check_pins(
    sg: SegmentedGraph,
    split: BatchSplit,
    cluster: Cluster,
    request: Request,
    *,
    context_degrees: tuple[int, ...],
    num_experts: int,
) -> None:
    """Raise InputError naming the pin and its valid values.

    ``context_degrees`` are those that the sequence allows, 1 among them; ``num_experts`` is 0 without a mixture.
    """
    check_degrees(cluster, request, context_degrees)
    check_experts(cluster, request, context_degrees, num_experts)
    check_shards(cluster, request, context_degrees)
    _check_heads(sg.graph, cluster, request)
    _check_batch(sg.graph.batch_size, split, cluster, request)
    check_schedule(sg, cluster, request)
    check_cuts(sg, cluster, request)


def tensor_degrees(sg: SegmentedGraph, cluster: Cluster) -> tuple[int, ...]:
    """Tensor degrees that stay inside a node, divide the devices and split no attention head."""
    heads = attention_heads(sg.graph)
    return tuple(
        degree
        for degree in divisors(cluster.num_devices)
        if cluster.devices_per_node % degree == 0 and all(count % degree == 0 for count in heads)
    )


def attention_heads(graph: Graph) -> tuple[int, ...]:
    """Query and key heads of every attention op, each number once."""
    return tuple(sorted({count for node in _attention(graph) for count in head_counts(graph, node)}))


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
                f"heads, and tp must divide both; valid: {listed(valid)}"
            )


def _check_batch(batch: int, split: BatchSplit, cluster: Cluster, request: Request) -> None:
    splits = request.dp not in (None, 1) or request.pp not in (None, 1) or request.microbatch not in (None, batch)
    if split.obstacle and splits:
        raise InputError(f"the batch cannot be split: {split.obstacle}. Use pp=1, dp=1 and microbatch={batch}")
    if request.dp is not None and batch % request.dp:
        valid = tuple(d for d in divisors(cluster.num_devices) if batch % d == 0)
        raise InputError(f"dp={request.dp} does not divide the batch of {batch}; valid: {listed(valid)}")
    if request.microbatch is not None:
        samples = batch // (request.dp or 1)
        if samples % request.microbatch:
            raise InputError(
                f"microbatch={request.microbatch} does not divide the {samples} samples of a data-parallel rank; "
                f"valid: {listed(divisors(samples))}"
            )
