"""The experts of a mixture: which parameters they are, how many rows a device computes, what it exchanges.

A *row* is one token for one of its k experts. How many rows an expert gets depends on the data; all counts here
assume that every expert gets the same.
"""

from collections.abc import Iterable, Sequence
from math import gcd

from autoplan.cluster import Group
from autoplan.cost import Collective, Work
from autoplan.ir import DTYPE_BYTES, Graph, OpNode, SegmentedGraph, TensorMeta
from autoplan.sharding import CollectiveKind, Strategy

Metas = Sequence[TensorMeta]

EXPERTS_OP = "autoplan.experts.default"
SLICE, EXCHANGE = "experts_slice", "experts_exchange"
"""Local forms: own experts for all tokens; tokens travel to the ranks of their experts and back."""

_HIDDEN, _INDEX, _WEIGHTS, _FIRST, _SECOND = range(5)


def expert_nodes(nodes: Iterable[OpNode]) -> tuple[OpNode, ...]:
    """The ops that compute experts."""
    return tuple(node for node in nodes if node.op == EXPERTS_OP)


def expert_params(node: OpNode) -> tuple[str, ...]:
    """Values that are weights of experts: dim 0 counts experts. They are parameters unless the model computes them."""
    return tuple(node.operands[i] for i in (_FIRST, _SECOND)) if node.op == EXPERTS_OP else ()


def num_experts(model: Graph | SegmentedGraph) -> int:
    """Experts of each layer, the greatest number that divides those of all layers; 0 for a model without."""
    graph = model.graph if isinstance(model, SegmentedGraph) else model
    return gcd(*(experts_of(node) for node in expert_nodes(graph.nodes)))


def experts_of(node: OpNode) -> int:
    """Experts that the op chooses from, before any split."""
    count = node.args[6]
    assert isinstance(count, int)
    return count


def num_rows(node: OpNode, operands: Metas) -> int:
    """Rows that one device computes; ``operands`` have local shapes, ``node.outputs`` the shape before this split."""
    local, experts = operands[_FIRST].shape[0], experts_of(node)
    slots = operands[_INDEX].shape[1]
    if local == experts:
        return operands[_HIDDEN].shape[0] * slots
    return -(-node.outputs[0].shape[0] * slots * local // experts)


def dispatch_bytes(node: OpNode, operands: Metas) -> int:
    """Bytes that one rank hands to one all-to-all: a copy of each of its tokens per expert chosen.

    ``operands`` have local shapes. Combining hands over as many, and backward does both once more.
    """
    tokens, width = operands[_HIDDEN].shape
    return tokens * operands[_INDEX].shape[1] * width * DTYPE_BYTES[operands[_HIDDEN].dtype]


def internal_collectives(
    node: OpNode, strategy: Strategy, operands: Metas, group: Group
) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """What the op communicates forward and backward.

    Forward says how many rows go to each expert, dispatches the rows and combines the results; backward does the last
    two the other way.
    """
    if strategy.local != EXCHANGE:
        return (), ()
    counts = experts_of(node) * DTYPE_BYTES["int64"]
    count, rows = (
        Collective(kind=CollectiveKind.ALL_TO_ALL, num_bytes=size, group=group)
        for size in (counts, dispatch_bytes(node, operands))
    )
    return (count, rows, rows), (rows, rows)


def forward_flops(node: OpNode, operands: Metas) -> int:
    """Two per multiply and add, of both projections."""
    first, second = operands[_FIRST].shape, operands[_SECOND].shape
    return 2 * num_rows(node, operands) * (first[1] * first[2] + second[1] * second[2])


def forward_work(node: OpNode, operands: Metas, results: Metas) -> Work:
    """Two grouped products; the rows are gathered, projected, activated, projected back and added up."""
    return Work(
        kind="matmul",
        flops=forward_flops(node, operands),
        num_bytes=_weight_bytes(node, operands) + _row_bytes(node, operands) + results[0].num_bytes,
        dtype=results[0].dtype,
        launches=2,
    )


def backward_work(node: OpNode, operands: Metas, results: Metas, needs: Sequence[bool]) -> Work:
    """Per projection one product for its rows and, where the experts are trained, one for its weights."""
    products = 1 + (needs[_FIRST] or needs[_SECOND])
    weights = _weight_bytes(node, operands) * products
    return Work(
        kind="matmul",
        flops=products * forward_flops(node, operands),
        num_bytes=weights + products * _row_bytes(node, operands) + results[0].num_bytes,
        dtype=results[0].dtype,
        launches=2 * products,
    )


def kept_bytes(node: OpNode, operands: Metas) -> int:
    """Kept for backward beside the operands: the first projection of each row. In an exchange also the rows that
    arrived, and the results that came back.
    """
    size = DTYPE_BYTES[operands[_HIDDEN].dtype]
    exchanged = operands[_FIRST].shape[0] < experts_of(node) and operands[_HIDDEN].shape[0] < node.outputs[0].shape[0]
    travelled = 2 * operands[_HIDDEN].shape[1] if exchanged else 0
    return num_rows(node, operands) * size * (operands[_FIRST].shape[1] + travelled)


def _weight_bytes(node: OpNode, operands: Metas) -> int:
    """Weights of the experts that rows can reach: fewer rows than experts leave some unread."""
    local = operands[_FIRST].shape[0]
    reached = min(local, num_rows(node, operands))
    return (operands[_FIRST].num_bytes + operands[_SECOND].num_bytes) * reached // max(1, local)


def _row_bytes(node: OpNode, operands: Metas) -> int:
    """Read and written per row: hidden twice (gathered, then read), the first projection twice, its half twice, and
    the result twice.
    """
    width, first, second = operands[_HIDDEN].shape[1], operands[_FIRST].shape[1], operands[_SECOND].shape[2]
    values = 2 * (2 * width + first + second)
    return num_rows(node, operands) * values * DTYPE_BYTES[operands[_HIDDEN].dtype]
