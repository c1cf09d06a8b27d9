"""Rows of the rule table for ops that reduce or normalise over dims, and for losses."""

from functools import partial

from autoplan.sharding import REPLICATE, Shard, Strategy, can_split
from autoplan.solver.rules_einsum import Einsum, Letters, Rule, Use, broadcast, names

_REDUCTIONS = ("none", "mean", "sum")
"""By the number torch passes."""


def _reduce(use: Use, *, sums: bool = False, form: str = "") -> Einsum:
    """Over the dims in the second argument, or all. Only where the op is a sum may a reduced dim be split."""
    shape = use.inputs[0].shape
    reduced = {dim % len(shape) for dim in use.integers(1, "dim")} if shape else set()
    if not reduced:
        reduced = set(range(len(shape)))
    letters = names("d", len(shape))
    operand = tuple(letter if sums or i not in reduced else None for i, letter in enumerate(letters))
    keep = len(use.outputs[0].shape) == len(shape)
    result = tuple(None if i in reduced else letter for i, letter in enumerate(letters) if keep or i not in reduced)
    return Einsum(
        inputs=(operand,),
        outputs=(result,) * len(use.outputs),
        linear=(frozenset({0}),) if sums else (),
        forms=tuple((letters[i], form) for i in sorted(reduced)) if form else (),
    )


def _reduce_all(use: Use, *, sums: bool = False, form: str = "") -> Einsum:
    letters = names("d", len(use.inputs[0].shape))
    operand: Letters = letters if sums else (None,) * len(letters)
    return Einsum(
        inputs=(operand,),
        outputs=((),),
        linear=(frozenset({0}),) if sums else (),
        forms=tuple((letter, form) for letter in letters) if form else (),
    )


def _reduce_norm(use: Use) -> Einsum:
    """``norm(x, p, dim, keepdim)``: dims come third."""
    args = (use.node.args[0], *use.node.args[2:3])
    kwargs = tuple(item for item in use.node.kwargs if item[0] == "dim")
    node = type(use.node)(name=use.node.name, op=use.node.op, args=args, kwargs=kwargs, outputs=use.node.outputs)
    return _reduce(Use(node=node, inputs=use.inputs, outputs=use.outputs, degree=use.degree))


def _along(use: Use, *, position: int = 1, default: int = -1, linear: bool = False) -> Einsum:
    """Works along one dim (softmax, cumsum), which stays whole."""
    shape = use.inputs[0].shape
    dim = use.dim(position, "dim", default)
    letters = tuple(None if i == dim else letter for i, letter in enumerate(names("d", len(shape))))
    return Einsum(inputs=(letters,), outputs=(letters,) * len(use.outputs), linear=(frozenset({0}),) if linear else ())


def _norm(use: Use) -> Einsum:
    """``layer_norm(x, shape, weight, bias)``: over the last dims, which stay whole."""
    ndim, over = len(use.inputs[0].shape), len(use.integers(1, "normalized_shape"))
    whole: Letters = (None,) * over
    letters = (*names("d", ndim - over), *whole)
    return Einsum(inputs=(letters, *((whole,) * (len(use.inputs) - 1))), outputs=(letters,))


def _group_norm(use: Use) -> Einsum:
    letters: Letters = ("n", *(None,) * (len(use.inputs[0].shape) - 1))
    return Einsum(inputs=(letters, *(((None,),) * (len(use.inputs) - 1))), outputs=(letters,))


def _elementwise_loss(use: Use, *, position: int = 2) -> Einsum:
    """A mean or sum over all elements of something pointwise, or all of them."""
    sizes = _broadcast_shape(tuple(meta.shape for meta in use.inputs))
    letters = names("d", len(sizes))
    reduction = _REDUCTIONS[use.integer(position, "reduction", 1)]
    return Einsum(
        inputs=tuple(broadcast(letters, sizes, meta.shape) for meta in use.inputs),
        outputs=(letters if reduction == "none" else (),),
        forms=tuple((letter, "mean") for letter in letters) if reduction == "mean" else (),
    )


def _broadcast_shape(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    ndim = max(map(len, shapes))
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) for sizes in zip(*padded, strict=True))


def _class_loss(use: Use, *, vocabulary: bool = False) -> Einsum:
    """``cross_entropy_loss(logits [n, v, ...], target [n, ...], weight [v])``, targets given as class numbers.

    A mean over split tokens divides by the number of valid labels in the whole batch; a split vocabulary needs
    the largest logit and the sum of exponentials of all ranks. Targets given as probabilities run whole.
    """
    shape, target = use.inputs[0].shape, use.inputs[1]
    sample: Letters = names("n", 1) if len(shape) > 1 else ()
    rest = names("p", max(len(shape) - 2, 0))
    by_class = not target.is_float
    tokens: Letters = (*sample, *rest) if by_class else (None,) * len(target.shape)
    logits = (*sample, None, *rest) if by_class else (None,) * len(shape)
    weights: tuple[Letters, ...] = ((None,),) * (len(use.inputs) - 2)
    reduction = _REDUCTIONS[use.integer(3, "reduction", 1)]
    return Einsum(
        inputs=(logits, tokens, *weights),
        outputs=(tokens if reduction == "none" else (),),
        forms=tuple((letter, "cross_entropy_tokens") for letter in tokens if letter) if reduction == "mean" else (),
        extra=_vocabulary_split(use) if vocabulary and by_class else (),
    )


def _vocabulary_split(use: Use) -> tuple[Strategy, ...]:
    shape = use.inputs[0].shape
    if len(shape) != 2 or not can_split(shape[1], use.degree) or use.arg(5, "label_smoothing", 0.0) != 0.0:
        return ()
    others = (REPLICATE,) * (len(use.inputs) - 1)
    return (Strategy(inputs=(Shard(1), *others), outputs=(REPLICATE,), local="cross_entropy_vocab"),)


_OVER_DIMS = (
    "amax.default", "amin.default", "max.dim", "min.dim", "argmax.default", "argmin.default", "prod.dim_int",
    "var.correction", "std.correction", "var.dim", "std.dim", "logsumexp.default", "any.dim", "all.dim",
)  # fmt: skip
_OVER_ALL = ("max.default", "min.default", "any.default", "all.default", "prod.default", "var.default", "std.default")

REDUCTIONS: dict[str, Rule] = {
    **{f"aten.{name}": _reduce for name in _OVER_DIMS},
    **{f"aten.{name}": _reduce_all for name in _OVER_ALL},
    "aten.sum.dim_IntList": partial(_reduce, sums=True),
    "aten.sum.default": partial(_reduce_all, sums=True),
    "aten.mean.dim": partial(_reduce, sums=True, form="mean"),
    "aten.mean.default": partial(_reduce_all, sums=True, form="mean"),
    "aten.linalg_vector_norm.default": _reduce_norm,
    "aten.norm.ScalarOpt_dim": _reduce_norm,
    "aten.softmax.int": _along,
    "aten._softmax.default": _along,
    "aten.log_softmax.int": _along,
    "aten._log_softmax.default": _along,
    "aten.cumsum.default": partial(_along, linear=True),
    "aten.cumprod.default": _along,
    "aten.sort.default": _along,
    "aten.topk.default": partial(_along, position=2),
    "aten.layer_norm.default": _norm,
    "aten.rms_norm.default": _norm,
    "aten.group_norm.default": _group_norm,
    "aten.cross_entropy_loss.default": partial(_class_loss, vocabulary=True),
    "aten.nll_loss_nd.default": _class_loss,
    "aten.mse_loss.default": _elementwise_loss,
    "aten.l1_loss.default": _elementwise_loss,
    "aten.smooth_l1_loss.default": _elementwise_loss,
    "aten.huber_loss.default": _elementwise_loss,
    "aten.binary_cross_entropy_with_logits.default": partial(_elementwise_loss, position=4),
}
