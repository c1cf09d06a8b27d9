"""Letters on the dims of an op, and the strategies that follow from them.

A rule is written like an einsum: every dim of every operand and result bears a letter, or None if it has to stay
whole. Splitting a letter splits each tensor that bears it; the rest follows:

    an operand without the letter     Replicate(partial_grad): each rank sees a part of its uses
    a result without the letter       Partial: the letter was summed away, each rank has a part of the sum
    a bias when a sum is split        Partial: it may be added once only

So ``linear`` is "...k, ok, o -> ...o", and its three ways to run split over o, over k and over each other letter.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoplan.ir import Arg, OpNode, Ref, TensorMeta, refs_in
from autoplan.sharding import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Partial,
    Placement,
    Replicate,
    Shard,
    Strategy,
    can_split,
)

Letters = tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One op as it is used: its arguments, the shapes it sees, and the axis it should be split over."""

    node: OpNode
    inputs: tuple[TensorMeta, ...]
    """One per operand."""
    outputs: tuple[TensorMeta, ...]
    degree: int
    block_counts: tuple[int, ...] = ()
    """Numbers of blocks, above 1, that ``Shard(dim, blocks=n)`` is tried with."""

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """An argument, however it was passed."""
        if position < len(self.node.args):
            return self.node.args[position]
        return dict(self.node.kwargs).get(name, default)

    def integer(self, position: int, name: str, default: int) -> int:
        """An argument that is an integer."""
        value = self.arg(position, name, default)
        assert isinstance(value, int), f"{name} of {self.node.where} is {value!r}, not an integer"
        return value

    def integers(self, position: int, name: str) -> tuple[int, ...]:
        """An argument that is a list of integers, or one; empty if it is missing."""
        value = self.arg(position, name)
        items = value if isinstance(value, tuple) else () if value is None else (value,)
        return tuple(item for item in items if isinstance(item, int))

    def dim(self, position: int = 1, name: str = "dim", default: int = 0) -> int:
        """An argument that is a dim of the first operand, from 0."""
        ndim = len(self.inputs[0].shape)
        return self.integer(position, name, default) % max(ndim, 1)

    def operand(self, position: int, name: str) -> int | None:
        """Which operand an argument is; None if it is not a tensor."""
        if position < len(self.node.args):
            before = sum(1 for _ in refs_in(self.node.args[:position]))
            return before if isinstance(self.node.args[position], Ref) else None
        before = sum(1 for _ in refs_in(self.node.args))
        for key, value in self.node.kwargs:
            if key == name:
                return before if isinstance(value, Ref) else None
            before += sum(1 for _ in refs_in(value))
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Einsum:
    """A rule for one use of an op. A letter in an operand but in no result is summed over."""

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    linear: tuple[frozenset[int], ...] = ()
    """Sets of operands in which the op is linear together: they may be Partial, then so are the results."""
    bias: frozenset[int] = frozenset()
    """Operands that are added to a sum."""
    exact: frozenset[str] = frozenset()
    """Letters whose sizes have to divide."""
    blocks: frozenset[str] = frozenset()
    """Letters that may be split within blocks."""
    forms: tuple[tuple[str, str], ...] = ()
    """Letters whose split needs a special local form, and its name."""
    extra: tuple[Strategy, ...] = ()
    """What letters cannot say."""


Rule = Callable[[Use], Einsum]


def names(prefix: str, count: int) -> tuple[str, ...]:
    """Letters for ``count`` dims."""
    return tuple(f"{prefix}{i}" for i in range(count))


def known_letters(*tensors: Letters) -> frozenset[str]:
    """All letters that occur."""
    return frozenset(letter for letters in tensors for letter in letters if letter is not None)


def broadcast(letters: Letters, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Letters:
    """Letters of an operand that is broadcast to ``sizes``, which bear ``letters``: none where it has size 1."""
    offset = len(sizes) - len(shape)
    return tuple(None if size == 1 and sizes[offset + i] != 1 else letters[offset + i] for i, size in enumerate(shape))


def linear_in_each(count: int) -> tuple[frozenset[int], ...]:
    """Linear in every one of ``count`` operands, the others held fixed."""
    return tuple(frozenset({i}) for i in range(count))


def strategies_of(rule: Einsum, use: Use) -> Iterator[Strategy]:
    """All strategies of a rule, as if every value needed a gradient: whole, each split, partial sums, extras."""
    for whole in (REPLICATE, REPLICATE_PARTIAL_GRAD):
        yield Strategy(inputs=(whole,) * len(use.inputs), outputs=(whole,) * len(use.outputs))
    for letter in _letters_in_order(rule):
        for blocks in (1, *(use.block_counts if letter in rule.blocks else ())):
            if _can_split(rule, use, letter, blocks):
                yield _split(rule, letter, blocks)
    for operands in rule.linear:
        yield Strategy(
            inputs=tuple(PARTIAL if i in operands else REPLICATE_PARTIAL_GRAD for i in range(len(use.inputs))),
            outputs=(PARTIAL,) * len(use.outputs),
        )
    yield from rule.extra


def normalise(strategy: Strategy, use: Use, needs_grad: Callable[[str], bool]) -> Strategy | None:
    """Forget gradients of values that have none; None if a value that is no float would be a partial sum."""
    operands = zip(strategy.inputs, use.inputs, use.node.operands, strict=True)
    results = zip(strategy.outputs, use.outputs, use.node.results, strict=True)
    inputs = tuple(_normalise(placement, meta, needs_grad(name)) for placement, meta, name in operands)
    outputs = tuple(_normalise(placement, meta, needs_grad(name)) for placement, meta, name in results)
    known_inputs = tuple(p for p in inputs if p is not None)
    known_outputs = tuple(p for p in outputs if p is not None)
    if known_inputs != inputs or known_outputs != outputs:
        return None
    return Strategy(inputs=known_inputs, outputs=known_outputs, local=strategy.local)


def _normalise(placement: Placement, meta: TensorMeta, has_grad: bool) -> Placement | None:
    match placement:
        case Replicate():
            return placement if has_grad else REPLICATE
        case Partial():
            return placement if meta.is_float else None
        case Shard():
            return placement


def _letters_in_order(rule: Einsum) -> tuple[str, ...]:
    found = dict.fromkeys(letter for letters in (*rule.outputs, *rule.inputs) for letter in letters)
    return tuple(letter for letter in found if letter is not None)


def _can_split(rule: Einsum, use: Use, letter: str, blocks: int) -> bool:
    tensors = [*zip(rule.inputs, use.inputs, strict=True), *zip(rule.outputs, use.outputs, strict=True)]
    sizes = {meta.shape[letters.index(letter)] for letters, meta in tensors if letter in letters}
    if letter in rule.exact or len(sizes) > 1:
        return all(size > 0 and size % (blocks * use.degree) == 0 for size in sizes)
    return all(can_split(size, use.degree, blocks) for size in sizes)


def _split(rule: Einsum, letter: str, blocks: int) -> Strategy:
    summed = all(letter not in letters for letters in rule.outputs)
    lacking = [PARTIAL if summed and i in rule.bias else REPLICATE_PARTIAL_GRAD for i in range(len(rule.inputs))]
    return Strategy(
        inputs=tuple(
            Shard(letters.index(letter), blocks) if letter in letters else otherwise
            for letters, otherwise in zip(rule.inputs, lacking, strict=True)
        ),
        outputs=tuple(
            Shard(letters.index(letter), blocks) if letter in letters else PARTIAL for letters in rule.outputs
        ),
        local=dict(rule.forms).get(letter, ""),
    )
