"""One class of segments on the tensor axis, as plain data: what may be chosen and what each choice costs.

A *value* has a placement its producer gives it (its source) and placements its consumers want. Between two
different ones lies a *move*, paid once per (value, wanted placement) however many consumers want it.
Times are microseconds of one microbatch on one device; bytes are those of one device.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from autoplan.cluster import Group
from autoplan.cost import Collective, CostModel, Work
from autoplan.ir import DTYPE_BYTES, TensorMeta
from autoplan.sharding import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    CollectiveKind,
    Partial,
    Placement,
    Replicate,
    Shard,
    Strategy,
    local_shape,
    redistribution,
)
from autoplan.solver.eliminate import Elimination, Scope
from autoplan.solver.shape import ValueShape

Storage = tuple[str, Placement]
"""A value as it lies in one placement."""
MoveKey = tuple[str, Placement, Placement]
"""A value, the placement it has and the one it is wanted in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One strategy of a node with its price."""

    strategy: Strategy
    forward_us: float
    backward_us: float
    weight_us: float = 0.0
    """The part of ``backward_us`` that only makes gradients of parameters: nothing waits for it."""
    internal: tuple[Collective, ...] = ()
    """Collectives inside the op, in the forward pass."""
    internal_us: float = 0.0
    internal_backward: tuple[Collective, ...] = ()
    """The same in the backward pass."""
    internal_backward_us: float = 0.0
    saved: tuple[Storage, ...] = ()
    """What it keeps for its backward pass."""
    extra_bytes: int = 0
    """Kept on top: dropout masks, statistics, log-probabilities."""

    @property
    def total_us(self) -> float:
        """Forward, backward and the collectives inside."""
        return self.forward_us + self.backward_us + self.internal_us + self.internal_backward_us


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProblem:
    """A node and the candidates to choose one from."""

    name: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    is_view: bool = False
    """The results share the storage of the first operand."""
    is_heavy: bool = False
    """A matmul or attention: its results are kept by selective recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueProblem:
    """A value: where it can come from and in which placements. Sources of a node's result follow from the node."""

    name: str
    meta: TensorMeta
    """Shape before the split along this axis."""
    origin: Literal["param", "input", "given", "node"]
    """``input`` comes from an earlier segment; ``given`` is prelude, constant or user input."""
    needs_grad: bool
    sources: tuple[Placement, ...]
    sync_us: tuple[float, ...] = ()
    """Parameters: per source, what summing the gradient over the axis costs once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A change of placement: its collectives in both directions (None: local or nothing) and their price."""

    forward: Collective | None
    backward: Collective | None
    forward_us: float
    backward_us: float
    copies: bool
    """Whether the result is a new tensor rather than the old one under another name."""

    @property
    def total_us(self) -> float:
        """Both directions."""
        return self.forward_us + self.backward_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What the objective charges beside the time of a microbatch."""

    step: float = 0.0
    """Weight of what is paid once a step."""
    state_us_per_byte: float = 0.0
    """For each byte of a parameter."""
    activation_us_per_byte: float = 0.0
    """For each byte kept from forward to backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemo:
    """What is known of nodes that are alike."""

    strategies: dict[frozenset[int], tuple[Strategy, ...]] = field(default_factory=dict)
    """By the numbers of blocks that a split may respect."""
    prices: dict[Strategy, Candidate] = field(default_factory=dict)
    """Without what is saved: that has names."""
    problems: dict[tuple[str, frozenset[int]], NodeProblem] = field(default_factory=dict)
    """By the name of the node, which tells the names of what it reads and makes, and by numbers of blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveGrid:
    """The moves between several sources and several wanted placements, as arrays of that shape."""

    total_us: npt.NDArray[np.float64]
    copies: npt.NDArray[np.bool_]
    differ: npt.NDArray[np.bool_]
    """Whether there is something to change."""
    source_bytes: npt.NDArray[np.float64]
    """Of the value in each source, on one device."""
    wanted_bytes: npt.NDArray[np.float64]
    """Of the value in each wanted placement, on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveMemo:
    """Prices of the moves of tensors that are alike."""

    moves: dict[tuple[Placement, Placement], Move] = field(default_factory=dict)
    grids: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], MoveGrid] = field(default_factory=dict)
    """By sources and wanted placements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The mesh axis a problem is about, and who prices it. It remembers prices: keep it for all problems about it."""

    group: Group
    cost: CostModel
    nodes: dict[Hashable, NodeMemo] = field(default_factory=dict, repr=False, compare=False)
    """By everything that tells one node from another except names."""
    moves: dict[tuple[TensorMeta, bool], MoveMemo] = field(default_factory=dict, repr=False, compare=False)
    """By the tensor and whether it has a gradient."""
    shapes: dict[Hashable, ValueShape] = field(default_factory=dict, repr=False, compare=False)
    """By everything a shape follows from."""
    plans: dict[tuple[Scope, tuple[Scope, ...]], Elimination] = field(default_factory=dict, repr=False, compare=False)
    """By the sizes of the variables and the scopes of the tables."""
    widths: dict[tuple[int, ...], int] = field(default_factory=dict, repr=False, compare=False)
    """Entries of the largest table that elimination needs, by the numbers of the shapes of all values."""
    locals: dict[tuple[TensorMeta, Placement], TensorMeta] = field(default_factory=dict, repr=False, compare=False)
    """A tensor as the first rank holds it."""

    @property
    def degree(self) -> int:
        """Ranks on the axis."""
        return self.group.size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Moves(Mapping[MoveKey, Move]):
    """Every change of a value's placement that can occur, priced when it is asked for."""

    axis: Axis
    of: Mapping[str, ValueProblem]
    sources: Mapping[str, Mapping[Placement, None]]
    wanted: Mapping[str, Mapping[Placement, None]]

    def __getitem__(self, key: MoveKey) -> Move:
        """The move of a value from one placement to another that it can be made and wanted in."""
        name, src, dst = key
        if src == dst or src not in self.sources[name] or dst not in self.wanted.get(name, ()):
            raise KeyError(key)
        value = self.of[name]
        return self._price(value, self._memo(value), src, dst)

    def __iter__(self) -> Iterator[MoveKey]:
        """By value."""
        for name, sources in self.sources.items():
            yield from ((name, src, dst) for dst in self.wanted.get(name, ()) for src in sources if src != dst)

    def __len__(self) -> int:
        """How many can occur."""
        return sum(1 for _ in self)

    def grid(self, name: str, sources: tuple[Placement, ...], wanted: tuple[Placement, ...]) -> MoveGrid:
        """The moves of a value between all of these."""
        value = self.of[name]
        memo = self._memo(value)
        if (sources, wanted) not in memo.grids:
            memo.grids[sources, wanted] = self._grid(value, memo, sources, wanted)
        return memo.grids[sources, wanted]

    def _grid(
        self, value: ValueProblem, memo: MoveMemo, sources: tuple[Placement, ...], wanted: tuple[Placement, ...]
    ) -> MoveGrid:
        shape = len(sources), len(wanted)
        total_us, copies, differ = np.zeros(shape), np.zeros(shape, dtype=np.bool_), np.zeros(shape, dtype=np.bool_)
        for i, src in enumerate(sources):
            for j, dst in enumerate(wanted):
                if src != dst:
                    move = self._price(value, memo, src, dst)
                    total_us[i, j], copies[i, j], differ[i, j] = move.total_us, move.copies, True
        source_bytes, wanted_bytes = (
            np.array([local_bytes(value.meta, place, self.axis.degree) for place in places], dtype=np.float64)
            for places in (sources, wanted)
        )
        return MoveGrid(
            total_us=total_us, copies=copies, differ=differ, source_bytes=source_bytes, wanted_bytes=wanted_bytes
        )

    def _memo(self, value: ValueProblem) -> MoveMemo:
        key = value.meta, value.needs_grad
        if key not in self.axis.moves:
            self.axis.moves[key] = MoveMemo()
        return self.axis.moves[key]

    def _price(self, value: ValueProblem, memo: MoveMemo, src: Placement, dst: Placement) -> Move:
        if (src, dst) not in memo.moves:
            memo.moves[src, dst] = price_move(value.meta, value.needs_grad, src, dst, self.axis)
        return memo.moves[src, dst]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Everything the ILP of one class needs; no solver object inside."""

    degree: int
    nodes: tuple[NodeProblem, ...]
    values: tuple[ValueProblem, ...]
    outputs: tuple[tuple[str, Placement | None], ...]
    """Value and how it must leave; None leaves it as it was made."""
    moves: Moves
    """Every change between two different placements that can occur."""

    def __post_init__(self) -> None:
        """A node without a candidate is a mistake of the caller, never an infinite price."""
        for node in self.nodes:
            assert node.candidates, f"{node.name} has no candidate"


def local_meta(meta: TensorMeta, placement: Placement, axis: Axis) -> TensorMeta:
    """The first (largest) rank's part."""
    key = meta, placement
    if key not in axis.locals:
        shape = local_shape(meta.shape, placement, axis.degree, 0)
        axis.locals[key] = TensorMeta(shape=shape, dtype=meta.dtype)
    return axis.locals[key]


def local_bytes(meta: TensorMeta, placement: Placement, degree: int) -> int:
    """Bytes of the first (largest) rank's part."""
    return math.prod(local_shape(meta.shape, placement, degree, 0)) * DTYPE_BYTES[meta.dtype]


def price_move(meta: TensorMeta, needs_grad: bool, src: Placement, dst: Placement, axis: Axis) -> Move:
    """Collectives and time of changing ``src`` to ``dst``. The backward half exists only where a gradient flows.

    A local change that cuts a part out costs a copy of that part.
    """
    forward_kind, backward_kind = redistribution(src, dst)
    if not needs_grad:
        backward_kind = None
    forward = _collective(forward_kind, meta, src, axis)
    backward = _collective(backward_kind, meta, dst, axis)
    copies = not (isinstance(src, Replicate) and isinstance(dst, Replicate))
    is_cut = copies and (forward is None or (backward is None and needs_grad))
    cut_us = _copy_us(meta, dst, axis) if is_cut else 0.0
    return Move(
        forward=forward,
        backward=backward,
        forward_us=axis.cost.collective_us(forward) if forward else cut_us,
        backward_us=axis.cost.collective_us(backward) if backward else cut_us * needs_grad,
        copies=copies,
    )


def _collective(kind: CollectiveKind | None, meta: TensorMeta, before: Placement, axis: Axis) -> Collective | None:
    if kind is None:
        return None
    whole = meta.num_bytes
    num_bytes = local_bytes(meta, before, axis.degree) if kind is CollectiveKind.ALL_TO_ALL else whole
    return Collective(kind=kind, num_bytes=num_bytes, group=axis.group)


def _copy_us(meta: TensorMeta, dst: Placement, axis: Axis) -> float:
    num_bytes = 2 * local_bytes(meta, dst, axis.degree)
    flops = num_bytes // (2 * DTYPE_BYTES[meta.dtype])
    return axis.cost.compute_us(Work(kind="memory", flops=flops, num_bytes=num_bytes, dtype=meta.dtype))


def sources_of(nodes: tuple[NodeProblem, ...], values: tuple[ValueProblem, ...]) -> dict[str, dict[Placement, None]]:
    """Every placement a value can be made in, in order of first use."""
    found = {v.name: dict.fromkeys(v.sources) for v in values}
    for node in nodes:
        for position, result in enumerate(node.results):
            found[result] |= dict.fromkeys(c.strategy.outputs[position] for c in node.candidates)
    return found


def wants_of(nodes: tuple[NodeProblem, ...]) -> Iterator[Storage]:
    """Every (value, placement) that some candidate reads, repeats included."""
    for node in nodes:
        for candidate in node.candidates:
            yield from zip(node.operands, candidate.strategy.inputs, strict=True)


def make_problem(
    nodes: tuple[NodeProblem, ...],
    values: tuple[ValueProblem, ...],
    outputs: tuple[tuple[str, Placement | None], ...],
    axis: Axis,
) -> Problem:
    """Complete a problem with the price of every move that can occur."""
    wanted: dict[str, dict[Placement, None]] = {}
    for name, dst in (*wants_of(nodes), *((name, dst) for name, dst in outputs if dst is not None)):
        wanted.setdefault(name, {})[dst] = None
    moves = Moves(
        axis=axis, of={value.name: value for value in values}, sources=sources_of(nodes, values), wanted=wanted
    )
    return Problem(degree=axis.degree, nodes=nodes, values=values, outputs=outputs, moves=moves)


def param_sources(wanted: Iterable[Placement], trainable: bool) -> tuple[Placement, ...]:
    """Placements a parameter may live in, from those its readers want.

    A gradient that is a sum over the ranks is summed once a step, so a trainable parameter may start that way.
    """
    found: set[Placement] = {p for p in wanted if not isinstance(p, Partial)}
    found.update((REPLICATE, REPLICATE_PARTIAL_GRAD) if trainable else (REPLICATE,))
    return tuple(sorted(found, key=lambda p: (not isinstance(p, Shard), str(p))))
