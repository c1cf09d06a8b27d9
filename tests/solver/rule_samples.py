"""One sample use or more of every op in the rule table; sizes 4, 5 and 6 split evenly and unevenly on 2 and 3 ranks."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

import autoplan.trace.experts_op  # noqa: F401, registers the op
from autoplan.ir import Arg, Ref, Token

X, Y, Z, M, INDEX = Ref("x"), Ref("y"), Ref("z"), Ref("m"), Ref("i")
FLOAT64 = Token("dtype", "float64")


@dataclass(frozen=True, kw_only=True)
class Sample:
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fixed: frozenset[str] = frozenset()
    """Float operands that torch gives no gradient."""

    def needs_grad(self, name: str) -> bool:
        return self.tensors[name].is_floating_point() and name not in self.fixed


def floats(*shape: int, seed: int = 0) -> Tensor:
    """In (0.3, 0.7): inside the domain of every op in the table."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return 0.3 + 0.4 * torch.rand(shape, dtype=torch.float64, generator=generator)


def integers(high: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def columns(high: int, rows: int, count: int) -> Tensor:
    """Per row so many different numbers below ``high``."""
    return torch.stack([torch.randperm(high, generator=torch.Generator().manual_seed(row)) for row in range(rows)])[
        :, :count
    ]


def booleans(*shape: int) -> Tensor:
    return integers(2, *shape).bool()


def sample(op: str, *args: Arg, kwargs: dict[str, Arg] | None = None, fixed: str = "", **tensors: Tensor) -> Sample:
    return Sample(
        op=f"aten.{op}", args=args, kwargs=tuple((kwargs or {}).items()), tensors=tensors, fixed=frozenset(fixed)
    )


_UNARY = """abs square exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal sin cos tan tanh sigmoid logit erf silu gelu
    relu relu6 leaky_relu elu selu celu softplus hardswish hardsigmoid hardtanh mish log_sigmoid floor ceil round trunc
    sign nan_to_num isnan isinf isfinite clone contiguous alias detach lift_fresh_copy neg positive logical_not
    zeros_like ones_like"""
_SCALAR = """add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar remainder.Scalar fmod.Scalar
    eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar mul.Scalar div.Scalar clamp_min.default
    clamp_max.default add.Tensor mul.Tensor div.Tensor sub.Tensor full_like.default"""
_BINARY = """add.Tensor sub.Tensor mul.Tensor div.Tensor true_divide.Tensor pow.Tensor_Tensor maximum.default
    minimum.default atan2.default remainder.Tensor fmod.Tensor eq.Tensor ne.Tensor lt.Tensor
    le.Tensor gt.Tensor ge.Tensor logical_and.default logical_or.default logical_xor.default"""
_BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")


def pointwise() -> list[Sample]:
    coarse = ((64 * floats(4, 6)).round() / 64).float()
    found = [sample(f"{op}.default", X, x=floats(4, 6)) for op in _UNARY.split()]
    found += [sample(op, X, 0.5, x=floats(5, 6)) for op in _SCALAR.split()]
    found += [sample(op, X, Y, x=floats(4, 5, 6), y=floats(5, 1)) for op in _BINARY.split()]
    found += [sample(f"{op}.Tensor", X, Y, x=integers(9, 4, 6), y=integers(9, 6)) for op in _BITS]
    found += [sample(f"{op}.Scalar", X, 3, x=integers(9, 4, 6)) for op in _BITS if "xor" not in op]
    return [
        *found,
        sample("add.Tensor", X, Y, x=floats(4, 6), y=floats(4, 6)),
        sample("add.Tensor", X, Y, kwargs={"alpha": 2}, x=floats(4, 6), y=floats(6)),
        sample("add.Tensor", X, 1, x=integers(9, 4, 6)),
        sample("mul.Tensor", X, Y, x=floats(4, 6), y=floats()),
        sample("mul.Tensor", X, M, x=floats(4, 6), m=booleans(4, 6)),
        sample("div.Tensor_mode", X, Y, kwargs={"rounding_mode": None}, x=floats(4, 6), y=floats(6)),
        sample("div.Tensor_mode", X, Y, kwargs={"rounding_mode": "floor"}, x=floats(4, 6), y=floats(6)),
        sample("pow.Scalar", 2.0, X, x=floats(4, 6)),
        sample("clamp.default", X, 0.4, 0.6, x=floats(4, 6)),
        sample("clamp.Tensor", X, Y, Z, x=floats(4, 6), y=floats(6) - 0.2, z=floats(6) + 0.2),
        sample("addcmul.default", X, Y, Z, x=floats(4, 6), y=floats(6), z=floats(4, 1)),
        sample("addcdiv.default", X, Y, Z, x=floats(4, 6), y=floats(6), z=floats(4, 1)),
        sample("lerp.Scalar", X, Y, 0.3, x=floats(4, 6), y=floats(4, 6)),
        sample("lerp.Tensor", X, Y, Z, x=floats(4, 6), y=floats(4, 6), z=floats(4, 6)),
        sample("dropout.default", X, 0.0, True, x=floats(4, 6)),
        sample("bitwise_not.default", X, x=integers(9, 4, 6)),
        sample("floor_divide.default", X, Y, x=integers(9, 4, 6), y=integers(9, 6) + 1),
        sample("floor_divide.Scalar", X, 2, x=integers(9, 4, 6)),
        sample("where.self", M, X, Y, m=booleans(4, 1), x=floats(4, 6), y=floats(6)),
        sample("where.ScalarSelf", M, 0.0, X, m=booleans(4, 6), x=floats(6)),
        sample("where.ScalarOther", M, X, 0.0, m=booleans(4, 6), x=floats(6)),
        sample("where.Scalar", M, 1.0, 0.0, m=booleans(4, 6)),
        sample("masked_fill.Scalar", X, M, 0.0, x=floats(4, 6), m=booleans(6)),
        sample("masked_fill.Scalar", X, M, -1.0, x=floats(4, 6), m=booleans(4, 1)),
        sample("masked_fill.Tensor", X, M, Y, x=floats(4, 6), m=booleans(6), y=floats()),
        sample("to.dtype", X, FLOAT64, x=coarse),
        sample("to.dtype", X, Token("dtype", "float32"), x=coarse.double()),
        sample("to.dtype", X, FLOAT64, x=integers(9, 4, 6)),
        sample("type_as.default", X, Y, x=coarse, y=floats(4, 6)),
        sample("type_as.default", X, Y, x=coarse, y=floats(6)),
        sample("to.dtype_layout", X, kwargs={"dtype": FLOAT64}, x=floats(4, 6)),
        sample("to.device", X, Token("device", "cpu"), FLOAT64, x=floats(4, 6)),
        sample("_to_copy.default", X, kwargs={"dtype": FLOAT64}, x=coarse),
    ]


def factories() -> list[Sample]:
    return [
        sample("zeros.default", (4, 6)),
        sample("ones.default", (4, 5)),
        sample("full.default", (4, 6), 2.5),
        sample("scalar_tensor.default", 2.5),
        sample("new_zeros.default", X, (5, 6), x=floats(4)),
        sample("new_ones.default", X, (), kwargs={"dtype": Token("dtype", "bool")}, x=integers(9, 4, 6)),
        sample("new_full.default", X, (6,), 0.5, x=floats(4, 5)),
        sample("arange.default", 6),
        sample("arange.default", 5, kwargs={"device": Token("device", "cpu"), "pin_memory": False}),
        sample("arange.start", 2, 8),
        sample("arange.start_step", 1, 14, 3, kwargs={"dtype": FLOAT64}),
    ]


def matmuls() -> list[Sample]:
    mask = floats(2, 1, 4, 5)
    return [
        sample("linear.default", X, Y, x=floats(4, 5, 6), y=floats(6, 6)),
        sample("linear.default", X, Y, Z, x=floats(2, 5, 6), y=floats(12, 6), z=floats(12)),
        sample("linear.default", X, Y, Z, x=floats(5), y=floats(7, 5), z=floats(7)),
        sample("addmm.default", X, Y, Z, x=floats(12), y=floats(5, 6), z=floats(6, 12)),
        sample("addmm.default", X, Y, Z, kwargs={"beta": 0.5, "alpha": 2},
               x=floats(5, 1), y=floats(5, 6), z=floats(6, 4)),
        sample("baddbmm.default", X, Y, Z, x=floats(1, 5), y=floats(4, 6, 5), z=floats(4, 5, 5)),
        sample("mm.default", X, Y, x=floats(4, 5), y=floats(5, 6)),
        sample("bmm.default", X, Y, x=floats(4, 5, 6), y=floats(4, 6, 3)),
        sample("mv.default", X, Y, x=floats(4, 5), y=floats(5)),
        sample("dot.default", X, Y, x=floats(5), y=floats(5)),
        sample("matmul.default", X, Y, x=floats(2, 4, 5, 6), y=floats(4, 6, 3)),
        sample("matmul.default", X, Y, x=floats(4, 1, 5, 6), y=floats(3, 6, 4)),
        sample("matmul.default", X, Y, x=floats(6), y=floats(4, 6, 5)),
        sample("matmul.default", X, Y, x=floats(4, 5, 6), y=floats(6)),
        sample("einsum.default", "bhk,hko->bo", (X, Y), x=floats(5, 4, 6), y=floats(4, 6, 3)),
        sample("conv1d.default", X, Y, Z, (2,), (1,), (1,), 1, x=floats(4, 6, 9), y=floats(4, 6, 3), z=floats(4)),
        sample("conv2d.default", X, Y, x=floats(2, 4, 5, 5), y=floats(6, 4, 3, 3)),
        sample("conv2d.default", X, Y, None, (1, 1), (0, 0), (1, 1), 2, x=floats(4, 4, 4, 4), y=floats(6, 2, 3, 3)),
        sample("conv3d.default", X, Y, None, x=floats(3, 2, 3, 3, 3), y=floats(4, 2, 2, 2, 2)),
        *(sample("scaled_dot_product_attention.default", X, Y, Z, *rest, x=floats(4, 6, 5, 4), y=floats(4, 6, 5, 4),
                 z=floats(4, 6, 5, 4, seed=3)) for rest in ((), (None, 0.0, True), (None, 0.0, False))),
        sample("scaled_dot_product_attention.default", X, Y, Z, Ref("m"), kwargs={"scale": 0.5},
               x=floats(2, 6, 4, 3), y=floats(2, 6, 5, 3), z=floats(2, 6, 5, 4), m=mask),
        sample("scaled_dot_product_attention.default", X, Y, Z, kwargs={"attn_mask": M},
               x=floats(2, 6, 4, 3), y=floats(2, 6, 5, 3), z=floats(2, 6, 5, 4),
               m=booleans(6, 4, 5) | (torch.arange(5) == 0)),
        sample("scaled_dot_product_attention.default", X, Y, Z, kwargs={"enable_gqa": True},
               x=floats(2, 12, 4, 3), y=floats(2, 6, 5, 3), z=floats(2, 6, 5, 3)),
        sample("scaled_dot_product_attention.default", X, Y, Z, None, 0.0, True, kwargs={"enable_gqa": True},
               x=floats(2, 6, 4, 3), y=floats(2, 1, 4, 3), z=floats(2, 1, 4, 3)),
        sample("embedding.default", X, INDEX, x=floats(7, 6), i=integers(7, 4, 5)),
        sample("embedding.default", X, INDEX, 3, x=floats(7, 6), i=integers(7, 4, 5)),
        sample("embedding.default", X, INDEX, -1, True, x=floats(7, 6), i=integers(7, 4, 5)),
    ]  # fmt: skip


_REDUCE = """amax amin argmax argmin logsumexp prod.dim_int max.dim min.dim any.dim all.dim var.correction
    std.correction var.dim std.dim sum.dim_IntList mean.dim"""
_REDUCE_ONE_DIM = ("argmax", "argmin", "prod.dim_int", "max.dim", "min.dim", "any.dim", "all.dim")


def reductions() -> list[Sample]:
    found = []
    for name in _REDUCE.split():
        op = name if "." in name else f"{name}.default"
        dim: Arg = 1 if name in _REDUCE_ONE_DIM else (1, -1)
        found.append(sample(op, X, dim, x=floats(4, 5, 6)))
        found.append(sample(op, X, dim, kwargs={"keepdim": True}, x=floats(5, 4, 6)))
    found += [
        sample(f"{op}.default", X, x=floats(4, 5))
        for op in ("sum", "mean", "max", "min", "any", "all", "prod", "var", "std")
    ]
    found += [sample(op, X, -1, x=floats(4, 5, 6)) for op in ("softmax.int", "log_softmax.int", "cumsum.default")]
    found += [sample(f"{op}.default", X, 1, False, x=floats(4, 5, 6)) for op in ("_softmax", "_log_softmax")]
    found += [
        sample(f"{op}.default", X, Y, x=floats(4, 6), y=floats(4, 6, seed=2))
        for op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    ]
    return [
        *found,
        sample("mean.dim", X, None, x=floats(4, 5)),
        sample("sum.default", X, x=integers(9, 4, 5)),
        sample("linalg_vector_norm.default", X, 2, (1,), True, x=floats(4, 5, 6)),
        sample("norm.ScalarOpt_dim", X, 2, (0,), x=floats(4, 5, 6)),
        sample("cumprod.default", X, 0, x=floats(4, 5)),
        sample("sort.default", X, x=floats(4, 5)),
        sample("topk.default", X, 2, 0, x=floats(4, 5)),
        sample("layer_norm.default", X, (6,), Y, Z, x=floats(4, 5, 6), y=floats(6), z=floats(6)),
        sample("layer_norm.default", X, (5, 6), x=floats(4, 5, 6)),
        sample("rms_norm.default", X, (6,), Y, x=floats(4, 5, 6), y=floats(6)),
        sample("group_norm.default", X, 2, Y, Z, x=floats(4, 6, 5), y=floats(6), z=floats(6)),
        sample("mse_loss.default", X, Y, 0, x=floats(4, 6), y=floats(4, 6)),
        sample("mse_loss.default", X, Y, 2, x=floats(5, 6), y=floats(5, 6, seed=4)),
        sample("binary_cross_entropy_with_logits.default", X, Y, Z, None, 1,
               x=floats(4, 5), y=floats(4, 5), z=floats(5), fixed="z"),
        *class_losses(),
    ]  # fmt: skip


def class_losses() -> list[Sample]:
    found = []
    for op in ("cross_entropy_loss.default", "nll_loss_nd.default"):
        for reduction in (0, 1, 2):
            found.append(sample(op, X, INDEX, None, reduction, 2, x=floats(5, 7), i=integers(7, 5)))
        found.append(sample(op, X, INDEX, Y, 1, 2, x=floats(6, 7), i=integers(7, 6), y=floats(7), fixed="y"))
        found.append(sample(op, X, INDEX, x=floats(4, 3, 5), i=integers(3, 4, 5)))
    name = "cross_entropy_loss.default"
    return [
        *found,
        sample(name, X, INDEX, Y, 1, 2, 0.1, x=floats(6, 7), i=integers(7, 6), y=floats(7), fixed="y"),
        sample(name, X, INDEX, kwargs={"label_smoothing": 0.1}, x=floats(6, 7), i=integers(7, 6)),
        sample(name, X, INDEX, None, 1, 2, x=floats(5, 3), i=torch.full((5,), 2)),
        sample(name, X, Y, x=floats(4, 5), y=floats(4, 5)),
        sample(name, X, INDEX, x=floats(7), i=torch.tensor(3)),
    ]


def shapes() -> list[Sample]:
    x, qkv = floats(4, 5, 6), floats(4, 2, 18)
    return [
        sample("view.default", X, (-1, 6), x=x),
        sample("view.default", X, (4, 30), x=x),
        sample("view.default", X, (4, 5, 2, 3), x=x),
        sample("view.default", X, (5, 6, 12), x=floats(5, 12, 6)),
        sample("view.default", X, (4, 2, 3, 6), x=qkv),
        sample("view.default", X, (4, 18), x=floats(4, 3, 6)),
        sample("reshape.default", X, (4, 1, 5, 6, 1), x=x),
        sample("_unsafe_view.default", X, (6, 2, 5), x=floats(12, 5)),
        sample("flatten.using_ints", X, 1, 2, x=floats(5, 6, 4)),
        sample("flatten.using_ints", X, 0, 1, x=floats(6, 5, 4)),
        sample("unflatten.int", X, 1, (6, 2), x=floats(4, 12)),
        sample("unsqueeze.default", X, 1, x=x),
        sample("squeeze.default", X, x=floats(4, 1, 6)),
        sample("squeeze.dim", X, 1, x=floats(4, 1, 6)),
        sample("squeeze.dim", X, 0, x=floats(4, 1, 6)),
        sample("squeeze.dims", X, (1, 2), x=floats(4, 1, 3)),
        sample("transpose.int", X, 1, -1, x=x),
        sample("swapaxes.default", X, 0, 1, x=x),
        sample("movedim.int", X, 0, -1, x=x),
        sample("mT.default", X, x=x),
        sample("permute.default", X, (2, 0, 1), x=x),
        sample("t.default", X, x=floats(4, 5)),
        sample("numpy_T.default", X, x=floats(4, 5)),
        sample("expand.default", X, (6, 4, 5, -1), x=floats(4, 1, 6)),
        sample("broadcast_to.default", X, (4, 6), x=floats(6)),
        sample("expand_as.default", X, Y, x=floats(4, 1), y=floats(4, 6)),
        sample("slice.Tensor", X, 1, 1, 4, x=x),
        sample("slice.Tensor", X, 0, 0, 9223372036854775807, x=x),
        sample("narrow.default", X, 2, 1, 3, x=x),
        sample("narrow.default", X, 0, 0, 4, x=x),
        sample("select.int", X, 1, -1, x=x),
        sample("split.Tensor", X, 6, 2, x=qkv),
        sample("split.Tensor", X, 4, -1, x=x),
        sample("split_with_sizes.default", X, (6, 6, 6), -1, x=qkv),
        sample("split_with_sizes.default", X, (1, 4), 1, x=x),
        sample("chunk.default", X, 2, 2, x=floats(4, 5, 12)),
        sample("unbind.int", X, 1, x=x),
        sample("cat.default", (X, Y, Z), -1, x=x, y=floats(4, 5, 6, seed=2), z=floats(4, 5, 6, seed=3)),
        sample("cat.default", (X, Y), 1, x=x, y=floats(4, 2, 6)),
        sample("stack.default", (X, Y), 1, x=floats(4, 6), y=floats(4, 6, seed=5)),
        sample("pad.default", X, (0, 1), "constant", 0.0, x=x),
        sample("pad.default", X, (1, -1, 0, 0), "constant", -100.0, x=x),
        sample("constant_pad_nd.default", X, (1, 0), x=x),
        sample("flip.default", X, (1,), x=x),
        sample("roll.default", X, (1,), (2,), x=x),
        sample("roll.default", X, (1,), x=x),
        sample("diff.default", X, 1, -1, Y, x=x, y=floats(4, 5, 1)),
        sample("tril.default", X, x=x),
        sample("triu.default", X, 1, x=x),
        sample("repeat.default", X, (2, 1, 3), x=floats(4, 6)),
        sample("repeat_interleave.self_int", X, 2, 1, x=floats(4, 6, 5)),
        sample("repeat_interleave.self_int", X, 2, x=floats(4, 6)),
        sample("index.Tensor", X, (INDEX, Ref("j")), x=x, i=integers(4, 4, 1), j=integers(5, 1, 6)),
        sample("index.Tensor", X, (None, INDEX), x=x, i=integers(5, 4, 6)),
        sample("index.Tensor", X, (INDEX, None, Ref("j")), x=x, i=integers(4, 4, 1), j=integers(6, 5)),
        sample("index_select.default", X, 1, INDEX, x=x, i=integers(5, 6)),
        sample("gather.default", X, 1, INDEX, x=floats(4, 5), i=integers(5, 4, 6)),
        sample("gather.default", X, 0, INDEX, x=floats(4, 6), i=integers(4, 5, 3)),
        sample("one_hot.default", INDEX, 7, i=integers(7, 4, 5)),
        sample("one_hot.default", INDEX, i=integers(7, 4, 5)),
        sample("scatter.value", X, 1, INDEX, 0, x=floats(4, 6), i=integers(6, 4, 2)),
        sample("scatter.value", X, 0, INDEX, 1.5, x=floats(4, 6), i=integers(4, 1, 6)),
        sample("scatter.value", X, 1, INDEX, 1.5, x=floats(4, 5, 6), i=integers(5, 4, 2, 3)),
        sample("scatter.src", X, 1, INDEX, Y, x=floats(4, 6), y=floats(4, 3), i=columns(6, 4, 3)),
        sample("scatter.src", X, 1, INDEX, Y, x=floats(4, 6), y=floats(3, 2), i=columns(6, 3, 2)),
        sample("slice_scatter.default", X, Y, 1, 1, 4, x=x, y=floats(4, 3, 6)),
        sample("slice_scatter.default", X, Y, -1, 0, 6, 2, x=x, y=floats(4, 5, 3)),
    ]


def experts() -> list[Sample]:
    """Tokens 6 and 5, experts 4 and 5, intermediate 6; in one sample a slot has no expert."""
    a, b, w = Ref("a"), Ref("b"), Ref("w")

    def one(act: str, *, tokens: int, count: int, first: int) -> Sample:
        index = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(t)) for t in range(tokens)])
        return Sample(
            op="autoplan.experts.default",
            args=(X, INDEX, w, a, b, act, count),
            tensors={
                "x": floats(tokens, 4), "i": index[:, :3], "w": floats(tokens, 3, seed=2),
                "a": floats(count, first, 4) - 0.5, "b": floats(count, 4, 6) - 0.5,
            },
        )  # fmt: skip

    lost = one("silu", tokens=6, count=4, first=12)
    lost.tensors["i"][2, 1] = 4
    return [
        one("silu", tokens=6, count=4, first=12),
        one("gelu", tokens=5, count=5, first=12),
        one("relu2", tokens=6, count=5, first=6),
        lost,
    ]


# what an empty tensor holds is not defined, so only its shape could be compared; same rules as zeros
UNPROVABLE = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default")

SAMPLES = (*pointwise(), *factories(), *matmuls(), *reductions(), *shapes(), *experts())
