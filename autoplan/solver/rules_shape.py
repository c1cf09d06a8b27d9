"""Rows of the rule table for ops that move elements: views, permutations, slices, joins, lookups.

All of them are linear in what they move.
"""

import math
from collections.abc import Iterator
from functools import partial

from autoplan.ir import Arg, Ref
from autoplan.sharding import Placement, Shard, Strategy, local_shape
from autoplan.solver.rules_einsum import Einsum, Letters, Rule, Use, broadcast, known_letters, names
from autoplan.solver.rules_pointwise import elementwise

_FIRST = (frozenset({0}),)


def _view(use: Use) -> Einsum:
    """Dims are grouped into the smallest runs of equal size before and after.

    A dim that is a run of its own on both sides is carried over. Within a longer run a split is local if it cuts
    the run's elements into the same equal blocks on both sides: ``(4, 6) -> (24,)`` takes Shard(0) to Shard(0),
    and Shard(1) to Shard(0, blocks=4).
    """
    before, after = use.inputs[0].shape, use.outputs[0].shape
    inputs: list[str | None] = [None] * len(before)
    outputs: list[str | None] = [None] * len(after)
    extra: list[Strategy] = []
    for left, right in _runs(before, after):
        if len(left) == len(right) == 1:
            inputs[left[0]] = outputs[right[0]] = f"d{right[0]}"
        else:
            extra += _regroup(use, left, right)
    return Einsum(
        inputs=(tuple(inputs),),
        outputs=(tuple(outputs),),
        linear=_FIRST,
        blocks=known_letters(tuple(outputs)),
        extra=tuple(extra),
    )


def _runs(before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """Pairs of runs of dims with equal numbers of elements; dims of size 1 belong to none."""
    left = [i for i, size in enumerate(before) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
    if math.prod(before) == 0:
        return
    while left:
        run_left, run_right = [left.pop(0)], [right.pop(0)]
        size_left, size_right = before[run_left[0]], after[run_right[0]]
        while size_left != size_right:
            if size_left < size_right:
                run_left.append(left.pop(0))
                size_left *= before[run_left[-1]]
            else:
                run_right.append(right.pop(0))
                size_right *= after[run_right[-1]]
        yield run_left, run_right


def _regroup(use: Use, left: list[int], right: list[int]) -> Iterator[Strategy]:
    cuts = _cuts(use, use.outputs[0].shape, right)
    for blocks, source in _cuts(use, use.inputs[0].shape, left).items():
        if blocks in cuts:
            yield Strategy(inputs=(source,), outputs=(cuts[blocks],))


def _cuts(use: Use, shape: tuple[int, ...], run: list[int]) -> dict[int, Shard]:
    """Ways to split a run, by the number of equal blocks of its elements that are each split."""
    found: dict[int, Shard] = {}
    outer = 1
    for dim in run:
        for blocks in (1, *use.block_counts):
            if shape[dim] % (blocks * use.degree) == 0:
                found.setdefault(outer * blocks, Shard(dim, blocks))
        outer *= shape[dim]
    return found


def _squeeze(use: Use) -> Einsum:
    """A dim that is asked for but is not 1 stays whole: one of its parts could be 1 and would vanish."""
    rule = _view(use)
    before = use.inputs[0].shape
    asked = {dim % max(len(before), 1) for dim in use.integers(1, "dim")} or set(range(len(before)))

    def survives(dim: int) -> bool:
        last = local_shape(before, Shard(dim), use.degree, use.degree - 1)[dim]
        return dim not in asked or last > 1

    inputs = tuple(letter if survives(i) else None for i, letter in enumerate(rule.inputs[0]))
    outputs = tuple(letter if letter in inputs else None for letter in rule.outputs[0])
    return Einsum(inputs=(inputs,), outputs=(outputs,), linear=_FIRST)


def _reorder(use: Use, order: tuple[int, ...]) -> Einsum:
    """Result dim i is operand dim ``order[i]``."""
    letters = names("d", len(order))
    return Einsum(
        inputs=(letters,), outputs=(tuple(letters[i] for i in order),), linear=_FIRST, blocks=known_letters(letters)
    )


def _transpose(use: Use) -> Einsum:
    order = list(range(len(use.inputs[0].shape)))
    a, b = use.dim(1, "dim0"), use.dim(2, "dim1")
    order[a], order[b] = order[b], order[a]
    return _reorder(use, tuple(order))


def _permute(use: Use) -> Einsum:
    ndim = len(use.inputs[0].shape)
    return _reorder(use, tuple(dim % ndim for dim in use.integers(1, "dims")))


def _move(use: Use) -> Einsum:
    order = list(range(len(use.inputs[0].shape)))
    source, target = use.dim(1, "source"), use.dim(2, "destination")
    order.insert(target, order.pop(source))
    return _reorder(use, tuple(order))


def _swap_last(use: Use) -> Einsum:
    *order, a, b = range(len(use.inputs[0].shape))
    return _reorder(use, (*order, b, a))


def _reverse(use: Use) -> Einsum:
    return _reorder(use, tuple(reversed(range(len(use.inputs[0].shape)))))


def _expand(use: Use) -> Einsum:
    return elementwise(use, _FIRST)


def _same_where(use: Use, whole: set[int]) -> Einsum:
    """Operands and results have the same dims; those in ``whole`` stay whole."""
    letters = tuple(None if i in whole else name for i, name in enumerate(names("d", len(use.inputs[0].shape))))
    return Einsum(
        inputs=(letters,) * len(use.inputs),
        outputs=(letters,) * len(use.outputs),
        linear=(frozenset(range(len(use.inputs))),),
    )


def _slice(use: Use) -> Einsum:
    """A slice that takes everything splits like a copy."""
    dim = use.dim()
    takes_all = use.inputs[0].shape == use.outputs[0].shape
    return _same_where(use, set() if takes_all else {dim})


def _select(use: Use) -> Einsum:
    return _drop_dim(use, use.dim())


def _drop_dim(use: Use, dim: int) -> Einsum:
    letters = names("d", len(use.inputs[0].shape))
    return Einsum(
        inputs=(tuple(None if i == dim else letter for i, letter in enumerate(letters)),),
        outputs=(tuple(letter for i, letter in enumerate(letters) if i != dim),) * len(use.outputs),
        linear=_FIRST,
    )


def _split(use: Use, *, position: int = 2) -> Einsum:
    """Along a dim that stays whole, or whose n equal parts are the blocks it is split within."""
    dim, parts = use.dim(position), len(use.outputs)
    rule = _same_where(use, {dim})
    equal = len({meta.shape for meta in use.outputs}) == 1
    sizes = use.outputs[0].shape[dim]
    extra = [
        Strategy(inputs=(Shard(dim, blocks),), outputs=(Shard(dim, blocks // parts),) * parts)
        for blocks in use.block_counts
        if equal and parts > 1 and blocks % parts == 0 and sizes % (blocks // parts * use.degree) == 0
    ]
    return Einsum(inputs=rule.inputs, outputs=rule.outputs, linear=rule.linear, extra=tuple(extra))


def _unbind(use: Use) -> Einsum:
    return _drop_dim(use, use.dim())


def _cat(use: Use) -> Einsum:
    """Along a dim that stays whole, or that comes out split within as many blocks as there are equal parts."""
    dim, parts = use.dim(), len(use.inputs)
    rule = _same_where(use, {dim})
    equal = len({meta.shape for meta in use.inputs}) == 1
    joined: list[Strategy] = []
    if equal and parts in use.block_counts and use.inputs[0].shape[dim] % use.degree == 0:
        source: tuple[Placement, ...] = (Shard(dim),) * parts
        joined.append(Strategy(inputs=source, outputs=(Shard(dim, parts),)))
    return Einsum(inputs=rule.inputs, outputs=rule.outputs, linear=rule.linear, extra=tuple(joined))


def _stack(use: Use) -> Einsum:
    letters = names("d", len(use.inputs[0].shape))
    dim = use.integer(1, "dim", 0) % (len(letters) + 1)
    return Einsum(
        inputs=(letters,) * len(use.inputs),
        outputs=((*letters[:dim], None, *letters[dim:]),),
        linear=(frozenset(range(len(use.inputs))),),
    )


def _pad(use: Use, *, position: int = 3) -> Einsum:
    """``pad`` lists (before, after) from the last dim on; padded dims stay whole. Linear if it pads with zeros."""
    ndim, amounts = len(use.inputs[0].shape), use.integers(1, "pad")
    whole = {ndim - 1 - i // 2 for i, amount in enumerate(amounts) if amount != 0}
    rule = _same_where(use, whole)
    zeros = use.arg(position, "value") in (None, 0)
    return Einsum(inputs=rule.inputs, outputs=rule.outputs, linear=rule.linear if zeros else ())


def _keep_dims(use: Use, *, position: int = 1, name: str = "dim") -> Einsum:
    """Moves along the dims in an argument only."""
    ndim = len(use.inputs[0].shape)
    return _same_where(use, {dim % ndim for dim in use.integers(position, name)} or set(range(ndim)))


def _diff(use: Use) -> Einsum:
    return _same_where(use, {use.dim(2, "dim", -1)})


def _triangle(use: Use) -> Einsum:
    ndim = len(use.inputs[0].shape)
    return _same_where(use, {ndim - 2, ndim - 1})


def _repeat(use: Use) -> Einsum:
    """Dims that are repeated stay whole; new ones are in front."""
    repeats = use.integers(1, "repeats")
    new = len(repeats) - len(use.inputs[0].shape)
    letters = tuple(
        name if repeat == 1 else None for name, repeat in zip(names("d", len(repeats)), repeats, strict=True)
    )
    outputs: Letters = ((None,) * new) + letters[new:]
    return Einsum(inputs=(letters[new:],), outputs=(outputs,), linear=_FIRST)


def _repeat_interleave(use: Use) -> Einsum:
    """Each element is followed by its copies, so equal parts stay equal parts."""
    if use.arg(2, "dim") is None:
        return Einsum(inputs=((None,) * len(use.inputs[0].shape),), outputs=((None,),), linear=_FIRST)
    letters = names("d", len(use.inputs[0].shape))
    return Einsum(inputs=(letters,), outputs=(letters,), linear=_FIRST, exact=frozenset({letters[use.dim(2)]}))


def _index(use: Use) -> Einsum:
    """``x[i, :, j]``: indices are broadcast together; their dims replace the indexed ones, or come first if apart."""
    slots = use.arg(1, "indices")
    assert isinstance(slots, tuple)
    if any(meta.dtype in ("bool", "uint8") for meta in use.inputs[1:]):
        return _whole(use)
    taken = [i for i, slot in enumerate(slots) if isinstance(slot, Ref)]
    letters = names("d", len(use.inputs[0].shape))
    kept = [letter for i, letter in enumerate(letters) if i not in taken]
    adjacent = taken == list(range(taken[0], taken[-1] + 1))
    at = taken[0] if adjacent else 0
    count = len(use.outputs[0].shape) - len(kept)
    index = names("i", count)
    sizes = use.outputs[0].shape[at : at + count]
    return Einsum(
        inputs=(
            tuple(None if i in taken else letter for i, letter in enumerate(letters)),
            *(broadcast(index, sizes, meta.shape) for meta in use.inputs[1:]),
        ),
        outputs=((*kept[:at], *index, *kept[at:]),),
        linear=_FIRST,
    )


def _whole(use: Use) -> Einsum:
    return Einsum(
        inputs=tuple((None,) * len(meta.shape) for meta in use.inputs),
        outputs=tuple((None,) * len(meta.shape) for meta in use.outputs),
    )


def _index_select(use: Use) -> Einsum:
    dim = use.dim()
    letters = names("d", len(use.inputs[0].shape))
    return Einsum(
        inputs=(tuple(None if i == dim else letter for i, letter in enumerate(letters)), ("i",)),
        outputs=(tuple("i" if i == dim else letter for i, letter in enumerate(letters)),),
        linear=_FIRST,
    )


def _gather(use: Use) -> Einsum:
    """Along ``dim`` the index may be split; other dims only where operand and index have the same size."""
    dim = use.dim()
    source, index = use.inputs[0].shape, use.inputs[1].shape
    letters = names("d", len(source))
    shared = tuple(name if source[i] == index[i] and i != dim else None for i, name in enumerate(letters))
    result = tuple("i" if n == dim else letter for n, letter in enumerate(shared))
    return Einsum(inputs=(shared, result), outputs=(result,), linear=_FIRST)


def _scatter(use: Use) -> Einsum:
    """``scatter(x, dim, index, value)``: writes along ``dim``, which stays whole; other dims as in gather."""
    dim = use.dim()
    shape, letters = use.inputs[0].shape, names("d", len(use.inputs[0].shape))
    alike = [all(meta.shape[i] == size for meta in use.inputs) and i != dim for i, size in enumerate(shape)]
    shared = tuple(name if same else None for name, same in zip(letters, alike, strict=True))
    source = use.operand(3, "src")
    linear = (frozenset({0, source}),) if source else _FIRST if use.arg(3, "value") == 0 else ()
    return Einsum(inputs=(shared,) * len(use.inputs), outputs=(shared,), linear=linear)


def _slice_scatter(use: Use) -> Einsum:
    """``slice_scatter(x, part, dim, ...)``: x with ``part`` written over a slice of it."""
    return _same_where(use, {use.dim(2)})


def _one_hot(use: Use) -> Einsum:
    letters = names("d", len(use.inputs[0].shape))
    given: Arg = use.arg(1, "num_classes", -1)
    if given == -1:  # the largest index of all ranks decides
        return _whole(use)
    return Einsum(inputs=(letters,), outputs=((*letters, None),))


SHAPES: dict[str, Rule] = {
    **{f"aten.{name}": _view for name in (
        "view.default", "reshape.default", "_unsafe_view.default", "flatten.using_ints", "unflatten.int",
        "unsqueeze.default",
    )},
    **{f"aten.squeeze.{name}": _squeeze for name in ("default", "dim", "dims")},
    "aten.transpose.int": _transpose,
    "aten.swapaxes.default": _transpose,
    "aten.permute.default": _permute,
    "aten.movedim.int": _move,
    "aten.mT.default": _swap_last,
    "aten.t.default": _reverse,
    "aten.numpy_T.default": _reverse,
    "aten.expand.default": _expand,
    "aten.broadcast_to.default": _expand,
    "aten.expand_as.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.narrow.default": _slice,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.unbind.int": _unbind,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": partial(_pad, position=2),
    "aten.flip.default": partial(_keep_dims, name="dims"),
    "aten.roll.default": partial(_keep_dims, position=2, name="dims"),
    "aten.diff.default": _diff,
    "aten.tril.default": _triangle,
    "aten.triu.default": _triangle,
    "aten.repeat.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.gather.default": _gather,
    "aten.one_hot.default": _one_hot,
    "aten.scatter.value": _scatter,
    "aten.scatter.src": _scatter,
    "aten.slice_scatter.default": _slice_scatter,
}  # fmt: skip
