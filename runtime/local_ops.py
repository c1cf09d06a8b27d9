"""Ops whose local form is not the plain op on local shards, and how to call any op.

``Strategy.local`` names the form; the batch axis and the tensor axis may each ask for one:

    mean                  mean over the local elements, weighted by their share of all elements      -> Partial
    arange                this rank's part of the range                                              -> Shard
    embedding_vocab       rows of the table that other ranks hold count as zeros                     -> Partial
    cross_entropy_tokens  sum over the local tokens, divided by the valid labels of the whole batch  -> Partial
    cross_entropy_vocab   logits split over the vocabulary, see ``vocab_loss.py``                    -> Replicate
    experts_slice         what this rank's experts add for every token                               -> Partial
    experts_exchange      tokens and experts split; tokens travel to their experts, see ``experts.py`` -> Shard
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import assert_never

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from autoplan.ir import Arg, OpNode, Ref, Token
from autoplan.runtime.collectives import AxisGroup
from autoplan.runtime.experts import exchange_experts
from autoplan.runtime.vocab_loss import vocab_cross_entropy
from autoplan.sharding import local_range

_CLASS_LOSSES = ("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
_REDUCTION = {"aten.binary_cross_entropy_with_logits.default": 4, **dict.fromkeys(_CLASS_LOSSES, 3)}
"""Position of the argument ``reduction``; 2 in the other losses."""
_MEAN, _SUM = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAxis:
    """One axis where an op runs. ``group`` is None on the batch axis, which never communicates inside an op."""

    size: int
    coordinate: int
    group: ProcessGroup | None
    form: str
    """``Strategy.local`` of the op on this axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUse:
    """One op with a special form on at least one axis."""

    node: OpNode
    """As it is at the global batch."""
    shapes: tuple[tuple[int, ...], ...]
    """Of each operand at the global batch, before any axis splits it."""
    batch: LocalAxis
    tensor: LocalAxis
    device: torch.device

    def argument(self, position: int, name: str, default: Arg) -> Arg:
        """An argument of the node, however it was passed."""
        return _argument(self.node, position, name, default)


def local_call(use: LocalUse, operands: tuple[Tensor, ...], denominator: Tensor | None = None) -> Tensor:
    """Run the special local form on this rank's ``operands``.

    ``denominator`` is what ``loss_denominator`` gave for the whole batch; cross_entropy_tokens needs it on whichever
    axis it is named, also beside cross_entropy_vocab.
    """
    match use.tensor.form or use.batch.form:
        case "mean":
            return _mean(use, operands)
        case "arange":
            return _arange(use)
        case "embedding_vocab":
            return _embedding_vocab(use, operands)
        case "cross_entropy_vocab":
            return _cross_entropy_vocab(use, operands, denominator)
        case "cross_entropy_tokens":
            return _cross_entropy_tokens(use, operands, denominator)
        case "experts_slice":
            return _experts_slice(use, operands)
        case "experts_exchange":
            return _experts_exchange(use, operands)
        case form:
            raise AssertionError(f"{use.node.where} has no local form {form!r}")


def denominator_operands(node: OpNode) -> tuple[str, ...]:
    """Names of the values that ``loss_denominator`` needs: the targets, and the class weights if there are any."""
    assert node.op in _CLASS_LOSSES, f"{node.op} is no loss over classes"
    return node.operands[1:]


def loss_denominator(node: OpNode, target: Tensor, weight: Tensor | None = None) -> Tensor:
    """What a mean loss over classes divides by: valid labels, or the sum of their weights. 0 gives a loss of nan."""
    assert (weight is not None) == (len(denominator_operands(node)) > 1), f"{node.where}: class weights do not match"
    valid = target != _ignore_index(node)
    if weight is None:
        return valid.sum()
    return torch.where(valid, weight[torch.where(valid, target, 0)], 0).sum()


def plain_call(node: OpNode, operands: tuple[Tensor, ...], device: torch.device) -> object:
    """Run the op of a node with ``operands`` in place of its values; a device argument becomes ``device``."""
    feed = iter(operands)

    def convert(arg: Arg) -> object:
        match arg:
            case Ref():
                return next(feed)
            case tuple():
                return [convert(item) for item in arg]
            case Token():
                return to_torch_token(arg, device)
            case None | bool() | int() | float() | str():
                return arg
            case _:
                assert_never(arg)

    args = [convert(arg) for arg in node.args]
    return resolve_op(node.op)(*args, **{key: convert(arg) for key, arg in node.kwargs})


def resolve_op(name: str) -> Callable[..., object]:
    """The torch op of that full name: ``aten.linear.default``."""
    namespace, packet, overload = name.split(".")
    op: Callable[..., object] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return op


def to_torch_token(
    token: Token, device: torch.device
) -> torch.dtype | torch.device | torch.layout | torch.memory_format:
    """The torch object that a token stands for; a device becomes the one given."""
    if token.kind == "device":
        return device
    found: object = getattr(torch, token.text)
    assert isinstance(found, torch.dtype | torch.layout | torch.memory_format), f"{token} is nothing torch knows"
    return found


def _argument(node: OpNode, position: int, name: str, default: Arg) -> Arg:
    if position < len(node.args):
        return node.args[position]
    return dict(node.kwargs).get(name, default)


def _with_argument(node: OpNode, position: int, name: str, value: Arg) -> OpNode:
    if position < len(node.args):
        return replace(node, args=(*node.args[:position], value, *node.args[position + 1 :]))
    others = tuple(item for item in node.kwargs if item[0] != name)
    return replace(node, kwargs=(*others, (name, value)))


def _ignore_index(node: OpNode) -> int:
    value = _argument(node, 4, "ignore_index", -100)
    assert isinstance(value, int)
    return value


def _tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _mean(use: LocalUse, operands: tuple[Tensor, ...]) -> Tensor:
    """Weighted by elements averaged here / elements averaged in all."""
    local: torch.Size = torch.broadcast_shapes(*(x.shape for x in operands))  # type: ignore[no-untyped-call]
    whole: torch.Size = torch.broadcast_shapes(*use.shapes)  # type: ignore[no-untyped-call]
    dims: Arg = use.argument(1, "dim", None) if use.node.op == "aten.mean.dim" else None
    chosen = dims if isinstance(dims, tuple) else (dims,)
    averaged = [d % len(local) for d in chosen if isinstance(d, int)] or range(len(local))
    share = prod(local[d] for d in averaged) / prod(whole[d] for d in averaged)
    return _tensor(plain_call(use.node, operands, use.device)) * share


def _arange(use: LocalUse) -> Tensor:
    """The rank's part, counted from the first element of the range in steps."""
    offset, count = 0, use.node.outputs[0].shape[0]
    for axis in (use.batch, use.tensor):
        if axis.form == "arange":
            start, end = local_range(count, axis.size, axis.coordinate)
            offset, count = offset + start, end - start
    first, step = _range_of(use.node)
    numbers = tuple(first + i * step for i in (offset, offset + count))
    options = tuple((key, value) for key, value in use.node.kwargs if key not in ("start", "end", "step"))
    if "dtype" not in dict(options):
        options = (*options, ("dtype", Token("dtype", use.node.outputs[0].dtype)))
    plain = replace(use.node, op="aten.arange.start_step", args=(*numbers, step), kwargs=options)
    return _tensor(plain_call(plain, (), use.device))


def _range_of(node: OpNode) -> tuple[int, int]:
    first: Arg = 0 if node.op == "aten.arange.default" else node.args[0]
    step: Arg = node.args[2] if len(node.args) > 2 else dict(node.kwargs).get("step", 1)
    assert isinstance(first, int) and isinstance(step, int), f"{node.where} counts in fractions"
    return first, step


def _embedding_vocab(use: LocalUse, operands: tuple[Tensor, ...]) -> Tensor:
    weight, index = operands
    start, end = local_range(use.shapes[0][0], use.tensor.size, use.tensor.coordinate)
    padding = use.argument(2, "padding_idx", -1)
    assert isinstance(padding, int)
    here = (index >= start) & (index < end)
    rows = torch.where(here, index - start, 0)
    local_padding = padding - start if start <= padding < end else -1
    found = torch.embedding(weight, rows, local_padding)
    nowhere = (index < 0) | (index >= use.shapes[0][0])  # the plain op raises; here a nan makes it seen
    return found.masked_fill(~here.unsqueeze(-1), 0).masked_fill(nowhere.unsqueeze(-1), float("nan"))


def _experts_slice(use: LocalUse, operands: tuple[Tensor, ...]) -> Tensor:
    """Indices are shifted to the experts of this rank; those outside add nothing."""
    hidden, index, *others = operands
    start, _ = local_range(use.shapes[3][0], use.tensor.size, use.tensor.coordinate)
    return _tensor(plain_call(use.node, (hidden, index - start, *others), use.device))


def _experts_exchange(use: LocalUse, operands: tuple[Tensor, ...]) -> Tensor:
    hidden, index, weights, *projections = operands

    def compute(rows: Tensor, experts: Tensor, ones: Tensor) -> Tensor:
        return _tensor(plain_call(use.node, (rows, experts, ones, *projections), use.device))

    axis = AxisGroup(group=use.tensor.group, size=use.tensor.size, coordinate=use.tensor.coordinate)
    return exchange_experts(hidden, index, weights, compute, use.shapes[3][0], axis)


def _cross_entropy_tokens(use: LocalUse, operands: tuple[Tensor, ...], denominator: Tensor | None) -> Tensor:
    assert denominator is not None, f"{use.node.where} needs the number of valid labels of the whole batch"
    summed = _with_argument(use.node, _REDUCTION[use.node.op], "reduction", _SUM)
    return _tensor(plain_call(summed, operands, use.device)) / denominator


def _cross_entropy_vocab(use: LocalUse, operands: tuple[Tensor, ...], denominator: Tensor | None) -> Tensor:
    logits, target, *weights = operands
    start, _ = local_range(use.shapes[0][1], use.tensor.size, use.tensor.coordinate)
    assert use.tensor.group is not None, "a split vocabulary needs a process group"
    losses = vocab_cross_entropy(
        logits, target, weights[0] if weights else None, ignore_index=_ignore_index(use.node),
        start=start, vocabulary=use.shapes[0][1], group=use.tensor.group,
    )  # fmt: skip
    match use.argument(3, "reduction", _MEAN):
        case 0:
            return losses
        case 1:
            assert denominator is not None or use.batch.form == "", f"{use.node.where} needs the count of all parts"
            count = loss_denominator(use.node, target, *weights) if denominator is None else denominator
            return losses.sum() / count
        case _:
            return losses.sum()
