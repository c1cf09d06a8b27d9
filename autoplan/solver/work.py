"""One op on local shapes -> the work a device does for it, forward and backward.

FLOPs count a multiply and an add as two. Views are no work: None. Shapes are those the device sees.
"""

import math
from collections.abc import Callable, Mapping

from autoplan.cost import Call, Work, WorkKind
from autoplan.ir import Arg, OpNode, Ref, TensorMeta, Token
from autoplan.solver import experts

Metas = tuple[TensorMeta, ...]

VIEW_OPS = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints", "unflatten.int",
        "transpose.int", "permute.default", "t.default", "movedim.int", "unsqueeze.default", "squeeze.default",
        "squeeze.dim", "squeeze.dims", "expand.default", "expand_as.default", "broadcast_to.default",
        "slice.Tensor", "select.int", "narrow.default", "split.Tensor", "split_with_sizes.default", "chunk.default",
        "unbind.int", "alias.default", "detach.default", "view_as.default", "swapaxes.default", "mT.default",
        "lift_fresh_copy.default", "numpy_T.default",
    )
)  # fmt: skip
_CASTS = frozenset({"aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default"})
SAME_VALUES = VIEW_OPS | _CASTS
"""Ops whose result has the values of their first operand, or some of them."""
_CREATORS = ("arange", "zeros", "ones", "full", "empty", "scalar_tensor")
_PASS_THROUGH_GRAD = frozenset({"aten.add.Tensor", "aten.add_.Tensor", "aten.contiguous.default", "aten.clone.default"})
_SPLITS = frozenset({"aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.unbind.int"})
"""Views of which backward joins the gradients of all parts."""
_CUTS = frozenset({"aten.slice.Tensor", "aten.select.int", "aten.narrow.default"})
"""Views of which backward sets the gradient of the part into zeros."""
_REPEATS = frozenset({"aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default"})
"""Views of which backward sums over what was repeated."""
_NORMS = frozenset({"aten.layer_norm.default", "aten.rms_norm.default", "aten.group_norm.default"})
_LOSSES = frozenset({"aten.cross_entropy_loss.default"})
_LOSS_PASSES = (4, 6)
"""How often a loss goes over its logits. Forward reads them for the largest, for the sum and for the log-probabilities
that it writes; backward writes zeros, reads both twice and writes the gradient (log_softmax, nll_loss of PyTorch)."""
ATTENTION_OPS = frozenset({"aten.scaled_dot_product_attention.default"})
EMBEDDING_OPS = frozenset({"aten.embedding.default"})


def _inner_last(node: OpNode, operands: Metas, result: TensorMeta) -> int:
    return 2 * result.num_elements * operands[0].shape[-1]


def _inner_after_bias(node: OpNode, operands: Metas, result: TensorMeta) -> int:
    return 2 * result.num_elements * operands[1].shape[-1]


def _convolution(node: OpNode, operands: Metas, result: TensorMeta) -> int:
    return 2 * result.num_elements * math.prod(operands[1].shape[1:])


def _einsum(node: OpNode, operands: Metas, result: TensorMeta) -> int:
    equation = node.args[0]
    assert isinstance(equation, str)
    sizes: dict[str, int] = {}
    for labels, meta in zip(equation.split("->", maxsplit=1)[0].split(","), operands, strict=True):
        sizes |= dict(zip(labels.strip(), meta.shape, strict=True))
    return 2 * math.prod(sizes.values())


MATMUL_FLOPS: dict[str, Callable[[OpNode, Metas, TensorMeta], int]] = {
    "aten.linear.default": _inner_last,
    "aten.mm.default": _inner_last,
    "aten.bmm.default": _inner_last,
    "aten.matmul.default": _inner_last,
    "aten.addmm.default": _inner_after_bias,
    "aten.baddbmm.default": _inner_after_bias,
    "aten.conv1d.default": _convolution,
    "aten.conv2d.default": _convolution,
    "aten.conv3d.default": _convolution,
    "aten.convolution.default": _convolution,
    "aten.einsum.default": _einsum,
}
"""FLOPs of the forward product, from the node, its local operands and its first local result."""


def is_view(node: OpNode, operands: Metas) -> bool:
    """Whether the results share the storage of the first operand (a cast to the same dtype counts)."""
    if node.op in _CASTS:
        return bool(operands) and operands[0].dtype == node.outputs[0].dtype
    return node.op in VIEW_OPS


def work_kind(node: OpNode) -> WorkKind:
    """The kind of work an op is when it is not a view."""
    if node.op in MATMUL_FLOPS or node.op == experts.EXPERTS_OP:
        return "matmul"
    return "attention" if node.op in ATTENTION_OPS else "memory"


def forward_work(node: OpNode, operands: Metas, results: Metas) -> Work | None:
    """Work of the forward pass; None for a view or a tensor made from nothing."""
    if is_view(node, operands) or _is_creator(node):
        return None
    if node.op == experts.EXPERTS_OP:
        return experts.forward_work(node, operands, results)
    return Work(
        kind=work_kind(node),
        flops=_flops(node, operands, results),
        num_bytes=_traffic(node, operands, results),
        dtype=results[0].dtype,
        call=_call(node, operands),
    )


def backward_work(node: OpNode, operands: Metas, results: Metas, needs: tuple[bool, ...]) -> Work | None:
    """Work of the backward pass; ``needs`` tells per operand whether its gradient is wanted."""
    wanted = [meta for meta, need in zip(operands, needs, strict=True) if need]
    if not wanted:
        return None
    if is_view(node, operands):
        return _view_backward(node, operands, results)
    if node.op == experts.EXPERTS_OP:
        return experts.backward_work(node, operands, results, needs)
    kind = work_kind(node)
    match kind:
        case "matmul":
            products = max(1, sum(need and len(meta.shape) > 1 for meta, need in zip(operands, needs, strict=True)))
            flops, launches = products * _flops(node, operands, results), products
            traffic = products * (_bytes(results) + _bytes(operands))
        case "attention":
            flops, launches = _flops(node, operands, results) * 5 // 2, 2
            traffic = 2 * (_bytes(results) + _bytes(operands))
        case "memory":
            flops, launches = 2 * _flops(node, operands, results), 1
            if node.op in _PASS_THROUGH_GRAD and all(meta.shape == results[0].shape for meta in wanted):
                return None
            traffic = _backward_traffic(node, operands, results, needs)
    return Work(
        kind=kind,
        flops=flops,
        num_bytes=traffic,
        dtype=results[0].dtype,
        launches=launches,
        call=_call(node, operands, needs),
    )


def _call(node: OpNode, operands: Metas, needs: tuple[bool, ...] = ()) -> Call:
    number = {name: i for i, name in enumerate(node.operands)}
    return Call(
        op=node.op,
        args=tuple(_numbered(arg, number) for arg in node.args),
        kwargs=tuple((name, _numbered(arg, number)) for name, arg in node.kwargs),
        operands=operands,
        needs=needs,
    )


def _numbered(arg: Arg, number: Mapping[str, int]) -> Arg:
    """An argument with positions in the place of names."""
    if isinstance(arg, Ref):
        return Token("value", str(number[arg.name]))
    return tuple(_numbered(item, number) for item in arg) if isinstance(arg, tuple) else arg


def _view_backward(node: OpNode, operands: Metas, results: Metas) -> Work | None:
    """Most views pass the gradient on as it is; some put it together."""
    repeats = node.op in _REPEATS and results[0].num_elements > operands[0].num_elements
    if not (repeats or node.op in _SPLITS or node.op in _CUTS):
        return None
    num_bytes = _bytes(results) + operands[0].num_bytes
    return Work(kind="memory", flops=0, num_bytes=num_bytes, dtype=operands[0].dtype)


def _backward_traffic(node: OpNode, operands: Metas, results: Metas, needs: tuple[bool, ...]) -> int:
    """Bytes that the backward pass of an op reads and writes."""
    wanted = [meta for meta, need in zip(operands, needs, strict=True) if need]
    if node.op in _LOSSES:
        return _LOSS_PASSES[1] * operands[0].num_bytes
    if node.op in EMBEDDING_OPS:
        return _bytes(results) + _bytes(wanted)
    traffic = _bytes(results) + 2 * _bytes(wanted)
    if node.op in _NORMS and any(needs[1:]):
        traffic += 2 * operands[0].num_bytes  # the gradients of scale and shift read input and gradient again
    return traffic + _mask_bytes(node, results)


def _mask_bytes(node: OpNode, results: Metas) -> int:
    """What a dropout writes, and reads again, on top: one byte for each element."""
    if node.op != "aten.dropout.default" or not (node.args[1] and node.args[2]):
        return 0
    return results[0].num_elements


def weight_share(node: OpNode, operands: Metas, needs: tuple[bool, ...], weights: tuple[bool, ...]) -> float:
    """The part of the backward pass that only makes gradients of parameters, which the operands in ``weights`` are.

    All of it where nothing else has a gradient. Of other ops only products are told apart: one per gradient, alike.
    """
    wanted = [(meta, weight) for meta, need, weight in zip(operands, needs, weights, strict=True) if need]
    if all(weight for _, weight in wanted):
        return 1.0
    if node.op == experts.EXPERTS_OP:
        return 0.5 if any(weight for _, weight in wanted) else 0.0
    if work_kind(node) != "matmul":
        return 0.0
    products = [weight for meta, weight in wanted if len(meta.shape) > 1]
    return sum(products) / max(1, len(products))


def _is_creator(node: OpNode) -> bool:
    return node.op.split(".")[1] in _CREATORS and not node.operands


def _bytes(metas: Metas | list[TensorMeta]) -> int:
    return sum(meta.num_bytes for meta in metas)


def _traffic(node: OpNode, operands: Metas, results: Metas) -> int:
    if node.op in EMBEDDING_OPS:
        return 2 * _bytes(results) + _bytes(operands[1:])
    if node.op in _LOSSES:
        return _LOSS_PASSES[0] * operands[0].num_bytes
    return _bytes(operands) + _bytes(results) + _mask_bytes(node, results)


def _flops(node: OpNode, operands: Metas, results: Metas) -> int:
    if node.op in MATMUL_FLOPS:
        return MATMUL_FLOPS[node.op](node, operands, results[0])
    if node.op in ATTENTION_OPS:
        scores = operands[0].num_elements // operands[0].shape[-1] * operands[1].shape[-2]
        full = 2 * scores * (operands[0].shape[-1] + operands[2].shape[-1])
        return full // 2 if _is_causal(node) else full
    return max((meta.num_elements for meta in (*operands, *results)), default=0)


def _is_causal(node: OpNode) -> bool:
    positional = node.args[5] if len(node.args) > 5 else False
    return bool(dict(node.kwargs).get("is_causal", positional))
