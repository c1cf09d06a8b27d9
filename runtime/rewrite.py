"""A run of graph nodes -> one local module: local ops, redistributions on the edges.

What enters: nodes with their strategies on the batch and the tensor axis, and how each outside value arrives.
What leaves: an ``fx.GraphModule`` called as ``module(part, *arrivals)`` that works on plain local tensors. ``part``
says which of the equal parts of the batch is being run. Print ``module.code`` to read it.

A value is brought to a needed placement once, however many ops need it so; autograd then adds up the gradients of
all of them before the one collective on the way back.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from autoplan.ir import Arg, OpNode, Ref, Token
from autoplan.localize import localize_node
from autoplan.plan.place import PlacedOp, PlacedValue
from autoplan.runtime.collectives import AxisGroup, redistribute
from autoplan.runtime.local_ops import LocalAxis, LocalUse, local_call, resolve_op, to_torch_token
from autoplan.sharding import REPLICATE_PARTIAL_GRAD, Placement, Replicate, local_shape

DENOMINATOR = "denominator:"
"""Prefix of the arrival that holds a loss's global denominator, before the name of the loss node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The two axes of a local module."""

    parts: int
    tensor: AxisGroup
    device: torch.device


@dataclass(slots=True, kw_only=True)
class _Builder:
    """The graph being written, and for each value where it stands in which placement."""

    graph: fx.Graph
    axes: Axes
    part: fx.Node
    values: dict[str, PlacedValue] = field(default_factory=dict)
    at: dict[tuple[str, Placement, Placement], fx.Node] = field(default_factory=dict)

    def define(self, value: PlacedValue, node: fx.Node) -> None:
        self.values[value.name] = value
        self.at[value.name, value.batch, value.tensor] = node

    def read(self, name: str, batch: Placement, tensor: Placement) -> fx.Node:
        """The node that holds a value in the wanted placement, redistributing it if nobody did yet."""
        found = self.at.get((name, batch, tensor))
        if found is not None:
            return found
        value = self.values[name]
        if tensor != value.tensor:
            node = self._redistribute(name, batch, value.tensor, tensor)
        else:
            node = self._change_on_batch(name, batch)
        self.at[name, batch, tensor] = node
        return node

    def _change_on_batch(self, name: str, batch: Placement) -> fx.Node:
        value, parts = self.values[name], self.axes.parts
        source = self.at[name, value.batch, value.tensor]
        if isinstance(value.batch, Replicate) and isinstance(batch, Replicate):
            return source  # gradients of parts are added up once a step, not here
        assert isinstance(value.batch, Replicate), f"{name} would communicate over the batch: {value.batch} -> {batch}"
        shape = local_shape(value.meta.shape, value.tensor, self.axes.tensor.size, self.axes.tensor.coordinate)

        def part_of(x: Tensor, part: int) -> Tensor:
            axis = AxisGroup(group=None, size=parts, coordinate=part)
            return redistribute(x, REPLICATE_PARTIAL_GRAD, batch, axis, shape)

        return self.graph.call_function(_named(f"part_of_{name}", part_of), (source, self.part))

    def _redistribute(self, name: str, batch: Placement, src: Placement, dst: Placement) -> fx.Node:
        shape = local_shape(self.values[name].meta.shape, batch, self.axes.parts, 0)
        axis = self.axes.tensor

        def change(x: Tensor) -> Tensor:
            return redistribute(x, src, dst, axis, shape)

        source = self.read(name, batch, src)
        return self.graph.call_function(_named(f"to_{dst}_{name}", change), (source,))


def local_module(
    ops: Sequence[PlacedOp],
    arrivals: Sequence[PlacedValue],
    departures: Sequence[tuple[str, Placement | None]],
    axes: Axes,
) -> fx.GraphModule:
    """Write the local form of ``ops``.

    ``departures`` names the values to return, each in a placement on the tensor axis (None: as the op made it).
    The module takes ``part`` (int), then the arrivals, then one denominator per op that needs one, and returns a tuple.
    """
    graph = fx.Graph()
    builder = _Builder(graph=graph, axes=axes, part=graph.placeholder("part"))
    # FX renames arguments called like builtins (a value may be "slice") in the body but not in the signature, where the
    # new name may be another argument's: the prefix keeps all names apart.
    for i, value in enumerate(arrivals):
        builder.define(value, graph.placeholder(_identifier(f"arrival_{i}_{value.name}")))
    denominators = {
        op.node.name: graph.placeholder(f"denominator_{op.node.name}") for op in ops if op.needs_denominator
    }
    for op in ops:
        _emit(builder, op, denominators.get(op.node.name))
    graph.output(tuple(
        builder.read(name, builder.values[name].batch, placement or builder.values[name].tensor)
        for name, placement in departures
    ))  # fmt: skip
    return fx.GraphModule(torch.nn.Module(), graph)


def _emit(builder: _Builder, op: PlacedOp, denominator: fx.Node | None) -> None:
    node, axes = op.node, builder.axes
    operands = [
        builder.read(name, batch, tensor)
        for name, batch, tensor in zip(node.operands, op.batch.inputs, op.tensor.inputs, strict=True)
    ]
    if op.batch.local or op.tensor.local:
        shapes = tuple(builder.values[name].meta.shape for name in node.operands)
        call = _named(node.name, _special(op, shapes, axes))
        result = builder.graph.call_function(call, (builder.part, denominator, *operands))
    else:
        halfway = localize_node(node, op.batch, axes.parts, 0)
        local = localize_node(halfway, op.tensor, axes.tensor.size, axes.tensor.coordinate)
        result = _plain(builder.graph, local, operands, axes.device)
    result.meta["where"] = node.where
    for i, name in enumerate(node.results):
        made = result if len(node.results) == 1 else builder.graph.call_function(operator.getitem, (result, i))
        value = PlacedValue(name=name, meta=node.outputs[i], batch=op.batch.outputs[i], tensor=op.tensor.outputs[i])
        builder.define(value, made)


_ANY_STRIDES = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
"""A redistributed tensor has the strides that its collective leaves, not those the model was traced with."""


def _plain(graph: fx.Graph, node: OpNode, operands: Sequence[fx.Node], device: torch.device) -> fx.Node:
    feed = iter(operands)

    def convert(arg: Arg) -> fx.node.Argument:
        match arg:
            case Ref():
                return next(feed)
            case tuple():
                return [convert(item) for item in arg]
            case Token():
                return to_torch_token(arg, device)
            case _:
                return arg

    args = tuple(convert(arg) for arg in node.args)
    return graph.call_function(
        resolve_op(_ANY_STRIDES.get(node.op, node.op)), args, {key: convert(arg) for key, arg in node.kwargs}
    )


def _special(op: PlacedOp, shapes: tuple[tuple[int, ...], ...], axes: Axes) -> Callable[..., object]:
    tensor = LocalAxis(
        size=axes.tensor.size, coordinate=axes.tensor.coordinate, group=axes.tensor.group, form=op.tensor.local
    )

    def call(part: int, denominator: Tensor | None, *operands: Tensor) -> object:
        batch = LocalAxis(size=axes.parts, coordinate=part, group=None, form=op.batch.local)
        use = LocalUse(node=op.node, shapes=shapes, batch=batch, tensor=tensor, device=axes.device)
        return local_call(use, operands, denominator)

    return call


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _named(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Give a closure the name under which it shows in ``module.code``."""
    function.__name__ = function.__qualname__ = _identifier(name)
    return function
