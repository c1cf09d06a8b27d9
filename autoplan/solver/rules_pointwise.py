"""Rows of the rule table for ops that work element by element, for casts and copies, and for factories.

Each output dim is a letter; an operand lacks the letters along which it is broadcast.
"""

from dataclasses import replace

from autoplan.sharding import REPLICATE, Placement, Shard, Strategy, can_split
from autoplan.solver.rules_einsum import (
    Einsum,
    Letters,
    Rule,
    Use,
    broadcast,
    known_letters,
    linear_in_each,
    names,
)


def elementwise(use: Use, linear: tuple[frozenset[int], ...] = ()) -> Einsum:
    """Letters of an op with broadcasting; linear only where the caller says so."""
    sizes = use.outputs[0].shape
    letters = names("d", len(sizes))
    return Einsum(
        inputs=tuple(broadcast(letters, sizes, meta.shape) for meta in use.inputs),
        outputs=(letters,) * len(use.outputs),
        linear=linear,
        blocks=known_letters(letters),
    )


def _add(use: Use) -> Einsum:
    both = use.operand(0, "self") is not None and use.operand(1, "other") is not None
    return elementwise(use, (frozenset({0, 1}),) if both else ())


def _multiply(use: Use) -> Einsum:
    return elementwise(use, linear_in_each(len(use.inputs)))


def _divide(use: Use) -> Einsum:
    plain = use.operand(0, "self") is not None and use.arg(2, "rounding_mode") is None
    return elementwise(use, (frozenset({0}),) if plain else ())


def _copy(use: Use) -> Einsum:
    both_float = use.inputs[0].is_float and use.outputs[0].is_float
    return elementwise(replace(use, inputs=use.inputs[:1]), (frozenset({0}),) if both_float else ())


def _type_as(use: Use) -> Einsum:
    """Only the dtype of the second operand is read; one of the same shape may be split alike."""
    rule = _copy(use)
    alike = use.inputs[1].shape == use.inputs[0].shape
    other = rule.inputs[0] if alike else (None,) * len(use.inputs[1].shape)
    return Einsum(inputs=(rule.inputs[0], other), outputs=rule.outputs, linear=rule.linear, blocks=rule.blocks)


def _where(use: Use) -> Einsum:
    branches = (use.operand(1, "self"), use.operand(2, "other"))
    return elementwise(use, (frozenset({1, 2}),) if None not in branches else ())


def _masked_fill(use: Use) -> Einsum:
    return elementwise(use, (frozenset({0}),) if use.arg(2, "value") == 0 else ())


def _shape_of(use: Use) -> Einsum:
    """``zeros_like``: the values of the operand are not read, its shape is."""
    return elementwise(use)


def _factory(use: Use) -> Einsum:
    """A tensor that is the same everywhere, so each part of it is made alone."""
    return Einsum(inputs=(), outputs=(names("d", len(use.outputs[0].shape)),))


def _new_factory(use: Use) -> Einsum:
    """``x.new_ones(shape)``: neither the values nor the shape of the operand are read."""
    shape, result = use.inputs[0].shape, use.outputs[0].shape
    operands = [Shard(dim) for dim, size in enumerate(shape) if can_split(size, use.degree)]
    results: list[Placement] = [REPLICATE]
    results += [Shard(dim) for dim, size in enumerate(result) if can_split(size, use.degree)]
    letters: Letters = (None,) * len(shape)
    return Einsum(
        inputs=(letters,),
        outputs=(names("d", len(result)),),
        extra=tuple(Strategy(inputs=(a,), outputs=(b,)) for a in operands for b in results),
    )


def _arange(use: Use) -> Einsum:
    return Einsum(inputs=(), outputs=(("d",),), forms=(("d", "arange"),))


_NONLINEAR = (
    "abs.default", "add.Scalar", "sub.Scalar", "rsub.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar",
    "square.default", "exp.default", "exp2.default", "expm1.default", "log.default", "log1p.default", "log2.default",
    "sqrt.default", "rsqrt.default", "reciprocal.default", "sin.default", "cos.default", "tan.default",
    "tanh.default", "sigmoid.default", "logit.default", "erf.default", "silu.default", "gelu.default",
    "relu.default", "relu6.default", "leaky_relu.default", "elu.default", "selu.default", "celu.default",
    "softplus.default", "hardswish.default", "hardsigmoid.default", "hardtanh.default", "mish.default",
    "log_sigmoid.default", "clamp.default", "clamp_min.default", "clamp_max.default", "clamp.Tensor",
    "maximum.default", "minimum.default", "atan2.default", "floor.default", "ceil.default", "round.default",
    "trunc.default", "sign.default", "floor_divide.default", "floor_divide.Scalar", "remainder.Scalar",
    "remainder.Tensor", "fmod.Scalar", "fmod.Tensor", "addcmul.default", "addcdiv.default", "lerp.Scalar",
    "lerp.Tensor", "dropout.default", "where.Scalar", "where.ScalarSelf", "where.ScalarOther",
    "masked_fill.Tensor", "nan_to_num.default", "isnan.default", "isinf.default", "isfinite.default",
    "eq.Scalar", "eq.Tensor", "ne.Scalar", "ne.Tensor", "lt.Scalar", "lt.Tensor", "le.Scalar", "le.Tensor",
    "gt.Scalar", "gt.Tensor", "ge.Scalar", "ge.Tensor", "logical_and.default", "logical_or.default",
    "logical_not.default", "logical_xor.default", "bitwise_and.Tensor", "bitwise_and.Scalar", "bitwise_or.Tensor",
    "bitwise_or.Scalar", "bitwise_xor.Tensor", "bitwise_not.default", "__and__.Tensor", "__and__.Scalar",
    "__or__.Tensor", "__or__.Scalar", "__xor__.Tensor",
)  # fmt: skip

_COPIES = (
    "to.dtype_layout", "to.dtype", "to.device", "_to_copy.default", "clone.default", "contiguous.default",
    "alias.default", "detach.default", "lift_fresh_copy.default", "neg.default", "positive.default",
)  # fmt: skip

POINTWISE: dict[str, Rule] = {
    **{f"aten.{name}": elementwise for name in _NONLINEAR},
    **{f"aten.{name}": _copy for name in _COPIES},
    "aten.add.Tensor": _add,
    "aten.sub.Tensor": _add,
    "aten.mul.Tensor": _multiply,
    "aten.mul.Scalar": _multiply,
    "aten.div.Tensor": _divide,
    "aten.div.Scalar": _divide,
    "aten.div.Tensor_mode": _divide,
    "aten.true_divide.Tensor": _divide,
    "aten.type_as.default": _type_as,
    "aten.where.self": _where,
    "aten.masked_fill.Scalar": _masked_fill,
}

FACTORIES: dict[str, Rule] = {
    **{f"aten.{name}": _factory for name in (
        "zeros.default", "ones.default", "full.default", "empty.memory_format", "scalar_tensor.default",
    )},
    **{f"aten.{name}": _shape_of for name in (
        "zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default",
    )},
    **{f"aten.{name}": _new_factory for name in (
        "new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default",
    )},
    **{f"aten.{name}": _arange for name in ("arange.default", "arange.start", "arange.start_step")},
}  # fmt: skip
