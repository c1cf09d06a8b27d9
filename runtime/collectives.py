"""Change how a local tensor lies on one axis: one collective at most in each direction, with the right gradient.

Each change of placement is a pair of moves, one for the value and one for its gradient. Values and gradients move
alike because they are split alike: the gradient of a Shard is that Shard, that of a Replicate or Partial is whole,
that of a Replicate(partial_grad) is a partial sum. ``sharding.redistribution`` names the collectives of each pair;
a test holds the two tables equal.
"""

from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import assert_never

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from autoplan.runtime import compat
from autoplan.runtime.layouts import local_part
from autoplan.runtime.regather import apart, gathered, is_asked
from autoplan.sharding import CollectiveKind, Partial, Placement, Replicate, Shard, local_range, local_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """One axis as this rank sees it. ``group`` may be None where only local changes are asked for."""

    group: ProcessGroup | None
    size: int
    coordinate: int


class Step(Enum):
    """What happens to a tensor."""

    KEEP = "keep"
    SLICE = "slice"
    """Take this rank's part of the whole."""
    EMBED = "embed"
    """Put this rank's part into zeros of the whole size."""
    FIRST = "first"
    """Keep it on the first rank, zeros elsewhere."""
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    """Sum over the ranks and take this rank's part."""
    EXCHANGE = "exchange"


_COLLECTIVES = {
    Step.REDUCE: CollectiveKind.ALL_REDUCE,
    Step.GATHER: CollectiveKind.ALL_GATHER,
    Step.SCATTER: CollectiveKind.REDUCE_SCATTER,
    Step.EXCHANGE: CollectiveKind.ALL_TO_ALL,
}


@dataclass(frozen=True, slots=True)
class Move:
    """A step and the split it concerns: what is gathered, or what is made; ``target`` is for an exchange only."""

    step: Step
    shard: Shard | None = None
    target: Shard | None = None

    @property
    def collective(self) -> CollectiveKind | None:
        """The one collective that it takes, if any."""
        return _COLLECTIVES.get(self.step)


_KEEP, _FIRST, _REDUCE = Move(Step.KEEP), Move(Step.FIRST), Move(Step.REDUCE)


def moves(src: Placement, dst: Placement) -> tuple[Move, Move]:
    """What happens to a value between two placements, and to its gradient on the way back."""
    match src, dst:
        case Shard(), Shard():
            return (_KEEP, _KEEP) if src == dst else (Move(Step.EXCHANGE, src, dst), Move(Step.EXCHANGE, dst, src))
        case Shard(), Replicate(partial_grad=True):
            return Move(Step.GATHER, src), Move(Step.SCATTER, src)
        case Shard(), Replicate():
            return Move(Step.GATHER, src), Move(Step.SLICE, src)
        case Shard(), Partial():
            return Move(Step.EMBED, src), Move(Step.SLICE, src)
        case Replicate(partial_grad=True), Shard():
            return Move(Step.SLICE, dst), Move(Step.EMBED, dst)
        case Replicate(), Shard():
            return Move(Step.SLICE, dst), Move(Step.GATHER, dst)
        case Partial(), Shard():
            return Move(Step.SCATTER, dst), Move(Step.GATHER, dst)
        case ((Replicate() | Partial()), (Replicate() | Partial())):
            return _unsplit_moves(src, dst)
    raise AssertionError(f"no way from {src} to {dst}")


def _unsplit_moves(src: Replicate | Partial, dst: Replicate | Partial) -> tuple[Move, Move]:
    match src, dst:
        case Partial(), Partial():
            return _KEEP, _KEEP
        case Partial(), Replicate(partial_grad=summed):
            return _REDUCE, _REDUCE if summed else _KEEP
        case Replicate(partial_grad=summed), Partial():
            return _FIRST, _FIRST if summed else _KEEP
        case Replicate(partial_grad=before), Replicate(partial_grad=after):
            return _KEEP, _KEEP if before == after else _REDUCE if after else _FIRST
    raise AssertionError(f"no way from {src} to {dst}")


def redistribute(x: Tensor, src: Placement, dst: Placement, axis: AxisGroup, shape: tuple[int, ...]) -> Tensor:
    """Turn this rank's ``x`` from ``src`` into ``dst``; ``shape`` is that of the value before the axis splits it.

    Differentiable once. Issues exactly the collectives of ``sharding.redistribution``, the backward one only if
    ``x`` requires a gradient. The result is contiguous where anything had to be moved.
    """
    if axis.size == 1 or src == dst:
        return x
    forward, backward = moves(src, dst)
    if x.requires_grad and torch.is_grad_enabled():
        changed: object = _Change.apply(x, forward, backward, axis, shape)  # type: ignore[no-untyped-call]
        assert isinstance(changed, Tensor)
    else:
        changed = apart(_make(x, forward, axis, shape))
    if forward.step is Step.GATHER and is_asked() and x.is_floating_point():
        gathered(changed, partial(_make, x.detach(), forward, axis, shape))
    return changed


class _Change(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        forward: Move,
        backward: Move,
        axis: AxisGroup,
        shape: tuple[int, ...],
    ) -> Tensor:
        ctx.way_back = (backward, axis, shape)  # type: ignore[attr-defined]
        return x.view_as(x) if forward.step is Step.KEEP else apart(_make(x, forward, axis, shape))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        move, axis, shape = ctx.way_back  # type: ignore[attr-defined]
        return _make(grad, move, axis, shape), None, None, None, None


def _make(x: Tensor, move: Move, axis: AxisGroup, shape: tuple[int, ...]) -> Tensor:
    match move.step:
        case Step.KEEP:
            return x
        case Step.FIRST:
            return x if axis.coordinate == 0 else torch.zeros_like(x)
        case Step.REDUCE:
            return compat.all_reduce(x.contiguous(), "sum", _group(axis))
        case Step.SLICE:
            return local_part(x, _split(move.shard), axis.size, axis.coordinate).contiguous()
        case Step.EMBED:
            return _embed(x, _split(move.shard), axis, shape)
        case Step.GATHER:
            return _gather(x, _split(move.shard), axis, shape)
        case Step.SCATTER:
            return _scatter(x, _split(move.shard), axis, shape)
        case Step.EXCHANGE:
            return _exchange(x, _split(move.shard), _split(move.target), axis, shape)
        case _:
            assert_never(move.step)


def _split(shard: Shard | None) -> Shard:
    assert shard is not None, "this move needs to know the split"
    return shard


def _group(axis: AxisGroup) -> ProcessGroup:
    assert axis.group is not None, "only local changes are possible on an axis without a process group"
    return axis.group


def _join(parts: list[Tensor], shard: Shard) -> Tensor:
    """Undo ``local_part``: the parts of all ranks -> the whole."""
    if shard.blocks == 1:
        return torch.cat(parts, shard.dim)
    pieces = [part.chunk(shard.blocks, shard.dim) for part in parts]
    return torch.cat([piece[block] for block in range(shard.blocks) for piece in pieces], shard.dim)


def _embed(x: Tensor, shard: Shard, axis: AxisGroup, shape: tuple[int, ...]) -> Tensor:
    parts = [x.new_zeros(local_shape(shape, shard, axis.size, i)) for i in range(axis.size)]
    parts[axis.coordinate] = x
    return _join(parts, shard)


def _pad(x: Tensor, shard: Shard, size: int) -> Tensor:
    """Make a short part as long as the first rank's: collectives want equal shapes."""
    missing = size - x.shape[shard.dim]
    if missing == 0:
        return x.contiguous()
    zeros = x.new_zeros((*x.shape[: shard.dim], missing, *x.shape[shard.dim + 1 :]))
    return torch.cat([x, zeros], shard.dim)


def _sizes(shard: Shard, axis: AxisGroup, shape: tuple[int, ...]) -> list[int]:
    return [local_shape(shape, shard, axis.size, i)[shard.dim] for i in range(axis.size)]


def _gather(x: Tensor, shard: Shard, axis: AxisGroup, shape: tuple[int, ...]) -> Tensor:
    sizes = _sizes(shard, axis, shape)
    joined = compat.all_gather(_pad(x, shard, sizes[0]), axis.size, _group(axis))
    if shard.dim == 0 and shard.blocks == 1:
        return joined.narrow(0, 0, shape[0])
    parts = joined.chunk(axis.size, 0)
    return _join([part.narrow(shard.dim, 0, size) for part, size in zip(parts, sizes, strict=True)], shard)


def _scatter(x: Tensor, shard: Shard, axis: AxisGroup, shape: tuple[int, ...]) -> Tensor:
    sizes = _sizes(shard, axis, shape)
    parts = [_pad(local_part(x, shard, axis.size, i), shard, sizes[0]) for i in range(axis.size)]
    own = compat.reduce_scatter(torch.cat(parts, 0), axis.size, _group(axis))
    return own.narrow(shard.dim, 0, sizes[axis.coordinate]).contiguous()


def _exchange(x: Tensor, shard: Shard, target: Shard, axis: AxisGroup, shape: tuple[int, ...]) -> Tensor:
    """Rank i sends to rank j what i has and j wants, in order of places along the dims that are split."""
    if shard.dim == target.dim:
        return _exchange_blocks(x, shard, target, axis, shape)
    outgoing = [local_part(x, target, axis.size, i) for i in range(axis.size)]
    arriving = [
        local_shape(local_shape(shape, shard, axis.size, i), target, axis.size, axis.coordinate)
        for i in range(axis.size)
    ]
    return _join(_send(outgoing, arriving, axis), shard)


def _exchange_blocks(x: Tensor, shard: Shard, target: Shard, axis: AxisGroup, shape: tuple[int, ...]) -> Tensor:
    """The same dim split within other blocks: work with lists of places along it."""
    dim, size = shard.dim, shape[shard.dim]
    had = [_places(size, shard, axis.size, i) for i in range(axis.size)]
    wanted = [_places(size, target, axis.size, i) for i in range(axis.size)]
    here = had[axis.coordinate]
    outgoing = [_take(x, dim, [k for k, place in enumerate(here) if place in set(goal)]) for goal in wanted]
    goal = wanted[axis.coordinate]
    from_ranks = [[place for place in places if place in set(goal)] for places in had]
    arriving = [(*shape[:dim], len(places), *shape[dim + 1 :]) for places in from_ranks]
    order = [place for places in from_ranks for place in places]
    received = torch.cat(_send(outgoing, arriving, axis), dim)
    return _take(received, dim, [order.index(place) for place in goal])


def _places(size: int, shard: Shard, degree: int, coordinate: int) -> list[int]:
    block = size // shard.blocks
    start, end = local_range(block, degree, coordinate)
    return [b * block + i for b in range(shard.blocks) for i in range(start, end)]


def _take(x: Tensor, dim: int, places: list[int]) -> Tensor:
    return x.index_select(dim, torch.tensor(places, dtype=torch.long, device=x.device))


def _send(outgoing: list[Tensor], arriving: list[tuple[int, ...]], axis: AxisGroup) -> list[Tensor]:
    """One all-to-all of parts of any shape."""
    flat = torch.cat([part.reshape(-1) for part in outgoing])
    received = [torch.Size(shape).numel() for shape in arriving]
    result = compat.all_to_all(flat, received, [part.numel() for part in outgoing], _group(axis))
    return [part.view(shape) for part, shape in zip(torch.split(result, received), arriving, strict=True)]
