"""A graph as one rank of an axis sees it: local shapes, and shape arguments to match.

Graph in, Graph out, same names. Splitting twice composes: first along the batch axis, then the result along the
tensor axis, because each split treats the shapes it is given as whole.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from autoplan.ir import Arg, Graph, OpNode, TensorMeta
from autoplan.sharding import REPLICATE, Placement, Strategy, local_shape

Rewrite = Callable[[OpNode, tuple[TensorMeta, ...]], Arg]


def _result_shape(_node: OpNode, outputs: tuple[TensorMeta, ...]) -> Arg:
    return outputs[0].shape


def _dim_of(node: OpNode, position: int, rank: int) -> int:
    dim = node.args[position] if len(node.args) > position else dict(node.kwargs).get("dim", 0)
    assert isinstance(dim, int)
    return dim % rank


def _split_size(node: OpNode, outputs: tuple[TensorMeta, ...]) -> Arg:
    return outputs[0].shape[_dim_of(node, 2, len(outputs[0].shape))]


def _split_sizes(node: OpNode, outputs: tuple[TensorMeta, ...]) -> Arg:
    dim = _dim_of(node, 2, len(outputs[0].shape))
    return tuple(meta.shape[dim] for meta in outputs)


def _narrow_length(node: OpNode, outputs: tuple[TensorMeta, ...]) -> Arg:
    return outputs[0].shape[_dim_of(node, 1, len(outputs[0].shape))]


def _unflatten_sizes(node: OpNode, outputs: tuple[TensorMeta, ...]) -> Arg:
    sizes = node.args[2]
    assert isinstance(sizes, tuple)
    rank_in = len(outputs[0].shape) - len(sizes) + 1
    dim = _dim_of(node, 1, rank_in)
    return outputs[0].shape[dim : dim + len(sizes)]


SHAPE_ARGUMENTS: dict[str, tuple[int, Rewrite]] = {
    "aten.view.default": (1, _result_shape),
    "aten._unsafe_view.default": (1, _result_shape),
    "aten.reshape.default": (1, _result_shape),
    "aten.expand.default": (1, _result_shape),
    "aten.broadcast_to.default": (1, _result_shape),
    "aten.unflatten.int": (2, _unflatten_sizes),
    "aten.split.Tensor": (1, _split_size),
    "aten.split_with_sizes.default": (1, _split_sizes),
    "aten.narrow.default": (3, _narrow_length),
    "aten.zeros.default": (0, _result_shape),
    "aten.ones.default": (0, _result_shape),
    "aten.empty.memory_format": (0, _result_shape),
    "aten.full.default": (0, _result_shape),
    "aten.new_zeros.default": (1, _result_shape),
    "aten.new_ones.default": (1, _result_shape),
    "aten.new_full.default": (1, _result_shape),
    "aten.new_empty.default": (1, _result_shape),
}
"""Op to (position of the argument that holds sizes, how its local value follows from the local results)."""


def localize(
    graph: Graph,
    strategies: Mapping[str, Strategy],
    placements: Mapping[str, Placement],
    degree: int,
    coordinate: int = 0,
) -> Graph:
    """Split a graph along one axis.

    ``strategies`` by node name; a node without one stays whole. ``placements`` of params, constants and inputs by
    value name; one without stays whole. ``coordinate`` matters for uneven splits only.
    """
    if degree == 1:
        return graph
    shrink = _Shrink(degree=degree, coordinate=coordinate)

    def meta(value: str, whole: TensorMeta) -> TensorMeta:
        return shrink(whole, placements.get(value, REPLICATE))

    return replace(
        graph,
        nodes=tuple(_localize_node(n, strategies.get(n.name), shrink) for n in graph.nodes),
        params=tuple(replace(p, meta=meta(p.value, p.meta)) for p in graph.params),
        constants=tuple((name, meta(name, whole)) for name, whole in graph.constants),
        inputs=tuple(replace(i, meta=meta(i.value, i.meta)) for i in graph.inputs),
    )


def localize_node(node: OpNode, strategy: Strategy | None, degree: int, coordinate: int) -> OpNode:
    """One node with its local result shapes and the shape argument that makes them."""
    return node if degree == 1 else _localize_node(node, strategy, _Shrink(degree=degree, coordinate=coordinate))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shrink:
    """Whole shapes to local ones; a model has few of them and uses each many times."""

    degree: int
    coordinate: int
    known: dict[tuple[TensorMeta, Placement], TensorMeta] = field(default_factory=dict)

    def __call__(self, whole: TensorMeta, placement: Placement) -> TensorMeta:
        key = whole, placement
        if key not in self.known:
            shape = local_shape(whole.shape, placement, self.degree, self.coordinate)
            self.known[key] = TensorMeta(shape=shape, dtype=whole.dtype)
        return self.known[key]


def _localize_node(node: OpNode, strategy: Strategy | None, shrink: _Shrink) -> OpNode:
    if strategy is None:
        return node
    outputs = tuple(shrink(whole, place) for whole, place in zip(node.outputs, strategy.outputs, strict=True))
    if outputs == node.outputs:
        return node
    args = node.args
    if node.op in SHAPE_ARGUMENTS:
        position, rewrite = SHAPE_ARGUMENTS[node.op]
        assert position < len(args), f"{node.op} passes its sizes by keyword"
        args = (*args[:position], rewrite(node, outputs), *args[position + 1 :])
    return OpNode(
        name=node.name, op=node.op, args=args, kwargs=node.kwargs, outputs=outputs,
        module_path=node.module_path, source=node.source,
    )  # fmt: skip
