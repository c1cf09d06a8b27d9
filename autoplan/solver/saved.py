"""What autograd keeps from an op's forward pass for its backward pass. Data, by op; checked against the rule table."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.errors import RuleError
from autoplan.ir import OpNode, TensorMeta
from autoplan.solver import experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Positions of the operands and of the results that are kept. Views keep their base; casts keep nothing."""

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()


_ALL = (0, 1, 2, 3, 4)
_BY_OP: tuple[tuple[Saved, str], ...] = (
    (Saved(), """add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar neg.default positive.default
        to.dtype_layout to.dtype to.device _to_copy.default clone.default contiguous.default alias.default
        detach.default lift_fresh_copy.default type_as.default floor.default ceil.default round.default trunc.default
        sign.default floor_divide.default floor_divide.Scalar remainder.Scalar fmod.Scalar dropout.default
        isnan.default isinf.default isfinite.default eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor
        le.Scalar le.Tensor gt.Scalar gt.Tensor ge.Scalar ge.Tensor logical_and.default logical_or.default
        logical_not.default logical_xor.default bitwise_and.Tensor bitwise_and.Scalar bitwise_or.Tensor
        bitwise_or.Scalar bitwise_xor.Tensor bitwise_not.default __and__.Tensor __and__.Scalar __or__.Tensor
        __or__.Scalar __xor__.Tensor zeros.default ones.default full.default empty.memory_format scalar_tensor.default
        zeros_like.default ones_like.default full_like.default empty_like.default new_zeros.default new_ones.default
        new_full.default new_empty.default arange.default arange.start arange.start_step view.default reshape.default
        _unsafe_view.default flatten.using_ints unflatten.int unsqueeze.default squeeze.default squeeze.dim
        squeeze.dims transpose.int swapaxes.default permute.default movedim.int mT.default t.default numpy_T.default
        expand.default expand_as.default broadcast_to.default slice.Tensor narrow.default select.int split.Tensor
        split_with_sizes.default chunk.default unbind.int cat.default stack.default pad.default
        constant_pad_nd.default flip.default roll.default diff.default tril.default triu.default repeat.default
        repeat_interleave.self_int one_hot.default sum.dim_IntList sum.default mean.dim mean.default cumsum.default
        any.dim all.dim any.default all.default slice_scatter.default"""),
    (Saved(operands=(0,)), """abs.default pow.Tensor_Scalar square.default log.default log1p.default log2.default
        sin.default cos.default logit.default erf.default silu.default gelu.default leaky_relu.default elu.default
        selu.default celu.default softplus.default hardswish.default hardsigmoid.default hardtanh.default
        relu6.default mish.default log_sigmoid.default clamp.default clamp_min.default clamp_max.default
        nan_to_num.default var.correction var.dim var.default"""),
    (Saved(results=(0,)), """tan.default exp.default exp2.default expm1.default sqrt.default rsqrt.default
        reciprocal.default tanh.default sigmoid.default relu.default softmax.int _softmax.default log_softmax.int
        _log_softmax.default"""),
    (Saved(results=(1,)), "max.dim min.dim sort.default topk.default"),
    (Saved(operands=(0,), results=(0,)), """logsumexp.default std.correction std.dim std.default prod.dim_int
        prod.default cumprod.default linalg_vector_norm.default norm.ScalarOpt_dim pow.Scalar amax.default
        amin.default max.default min.default argmax.default argmin.default"""),
    (Saved(operands=(0, 1)), """mul.Tensor mul.Scalar div.Tensor div.Scalar div.Tensor_mode true_divide.Tensor
        maximum.default minimum.default atan2.default remainder.Tensor fmod.Tensor linear.default mm.default
        bmm.default mv.default dot.default matmul.default conv1d.default conv2d.default conv3d.default
        rms_norm.default group_norm.default mse_loss.default l1_loss.default smooth_l1_loss.default
        huber_loss.default"""),
    (Saved(operands=(1, 2)), "addmm.default baddbmm.default addcmul.default addcdiv.default"),
    (Saved(operands=_ALL), "einsum.default binary_cross_entropy_with_logits.default lerp.Tensor clamp.Tensor"),
    (Saved(operands=(0, 1), results=(0,)), "pow.Tensor_Tensor"),
    (Saved(operands=_ALL), "nll_loss_nd.default layer_norm.default"),
    (Saved(operands=(0, 1)), "gather.default"),
    (Saved(operands=(1,)), "scatter.value scatter.src"),
    (Saved(operands=(0, 1, 2), results=(0,)), "scaled_dot_product_attention.default"),
    (Saved(operands=(0,)), "where.self where.Scalar where.ScalarSelf where.ScalarOther"),
    (Saved(operands=(1,)), "masked_fill.Scalar masked_fill.Tensor embedding.default index_select.default"),
    (Saved(operands=(1, 2, 3, 4)), "index.Tensor cross_entropy_loss.default"),
    (Saved(), "lerp.Scalar"),
)  # fmt: skip

SAVED: Mapping[str, Saved] = {
    **{f"aten.{name}": kept for kept, names in _BY_OP for name in names.split()},
    experts.EXPERTS_OP: Saved(operands=_ALL),
}
"""Full op name to what it keeps."""

_SCALED = frozenset({"aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar"})


def saved(node: OpNode) -> Saved:
    """What the op keeps when gradients flow through it. Raises RuleError for an op that the table lacks.

    Parameters are among the operands; they are there anyway, so count them once as parameters.
    """
    if node.op not in SAVED:
        raise RuleError(f"{node.where}: nothing is known about what it keeps for backward; add it to solver/saved.py")
    if node.op in _SCALED and len(node.operands) < 2:
        return Saved()
    kept = SAVED[node.op]
    return Saved(
        operands=tuple(i for i in kept.operands if i < len(node.operands)),
        results=tuple(i for i in kept.results if i < len(node.results)),
    )


def saved_extra_bytes(node: OpNode, operands: tuple[TensorMeta, ...], results: tuple[TensorMeta, ...]) -> int:
    """Bytes kept that are neither an operand nor a result: dropout masks, statistics, log-probabilities.

    ``operands`` and ``results`` have local shapes.
    """
    match node.op:
        case experts.EXPERTS_OP:
            return experts.kept_bytes(node, operands)
        case "aten.dropout.default":
            probability, training = node.args[1], node.args[2]
            return results[0].num_elements if training and probability else 0
        case "aten.cross_entropy_loss.default":
            return operands[0].num_bytes
        case "aten.group_norm.default":
            groups = node.args[1]
            assert isinstance(groups, int)
            return 2 * 4 * operands[0].shape[0] * groups
        case "aten.layer_norm.default" | "aten.rms_norm.default":
            over = max(1, operands[1].num_elements) if len(operands) > 1 else max(1, operands[0].shape[-1])
            return 2 * 4 * (operands[0].num_elements // over)
        case "aten.scaled_dot_product_attention.default":
            return 4 * (operands[0].num_elements // max(1, operands[0].shape[-1]))
        case _:
            return 0
