"""Which ops of a graph draw random numbers: their results would depend on how the graph is split."""

from autoplan.ir import Graph, OpNode

_DROP_RATE = {"aten.dropout.default": (1, "p"), "aten.scaled_dot_product_attention.default": (4, "dropout_p")}
"""Op to the position and the name of its drop rate."""


def random_ops(graph: Graph) -> tuple[tuple[OpNode, float], ...]:
    """Ops that drop out when the graph runs, with their rates."""
    rates = ((node, _drop_rate(node)) for node in graph.nodes if node.op in _DROP_RATE)
    return tuple((node, rate) for node, rate in rates if rate > 0)


def _drop_rate(node: OpNode) -> float:
    position, name = _DROP_RATE[node.op]
    rate = node.args[position] if len(node.args) > position else dict(node.kwargs).get(name, 0.0)
    training = node.op != "aten.dropout.default" or bool(node.args[2])
    return float(rate) if training and isinstance(rate, int | float) else 0.0
