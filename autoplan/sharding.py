"""How one tensor lies on one mesh axis, and what changing that costs in collectives.

Example, a (4, 6) tensor on an axis of 2:

    Shard(0)              rank 0 holds rows 0-1, rank 1 rows 2-3; so does the gradient
    Shard(1, blocks=3)    the 6 columns are 3 blocks of 2 (query, key, value), each block is split:
                          rank 0 holds columns 0, 2, 4, rank 1 columns 1, 3, 5
    Replicate()           both hold all of it, and both hold the whole gradient
    Replicate(partial_grad=True)
                          both hold all of it, the gradient is the sum of what the two hold
    Partial()             the value is the sum of what the two hold; both hold the whole gradient

Uneven sizes split as ``torch.chunk`` does: 7 over 2 is 4 and 3. A split never leaves a rank empty.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import final


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """Split along ``dim``, within each of ``blocks`` equal blocks of that dim."""

    dim: int
    blocks: int = 1

    def __str__(self) -> str:
        """Print as ``Shard(0)`` or ``Shard(0, blocks=3)``."""
        return f"Shard({self.dim})" if self.blocks == 1 else f"Shard({self.dim}, blocks={self.blocks})"


@final
@dataclass(frozen=True, slots=True)
class Replicate:
    """Whole on every rank; ``partial_grad`` says that the gradient is a sum over the ranks."""

    partial_grad: bool = False

    def __str__(self) -> str:
        """Print as ``Replicate`` or ``Replicate(partial_grad)``."""
        return "Replicate(partial_grad)" if self.partial_grad else "Replicate"


@final
@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the sum over the ranks; the gradient is whole on every rank."""

    def __str__(self) -> str:
        """Print as ``Partial``."""
        return "Partial"


Placement = Shard | Replicate | Partial

REPLICATE = Replicate()
REPLICATE_PARTIAL_GRAD = Replicate(partial_grad=True)
PARTIAL = Partial()

MOST_DIMS, MOST_BLOCKS = 64, 1_000_000
"""Beyond these a placement is a slip."""

_SHARD = re.compile(r"Shard\((\d+)(?:, ?blocks=(\d+))?\)")


def parse_placement(text: str) -> Placement:
    """Read back what ``str(placement)`` wrote; ValueError on anything else."""
    for placement in (REPLICATE, REPLICATE_PARTIAL_GRAD, PARTIAL):
        if text == str(placement):
            return placement
    match = _SHARD.fullmatch(text)
    if match and int(match[1]) < MOST_DIMS and 1 <= int(match[2] or 1) <= MOST_BLOCKS:
        return Shard(int(match[1]), int(match[2] or 1))
    raise ValueError(
        f"{text!r} is not a placement; expected Shard(DIM), Shard(DIM, blocks=N), Replicate, "
        "Replicate(partial_grad) or Partial"
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run an op on an axis with no communication inside.

    ``inputs`` has one placement per operand of the node, ``outputs`` one per result. ``local`` names the special
    local form an op needs when its plain form on local shards would be wrong (see ``runtime/local_ops.py``).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    local: str = ""

    def __str__(self) -> str:
        """Print as ``Replicate(partial_grad), Shard(0) -> Shard(2)``."""
        left, right = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        return f"{left} -> {right}" + (f" [{self.local}]" if self.local else "")


def parse_strategy(text: str) -> Strategy:
    """Read back what ``str(strategy)`` wrote."""
    match = re.fullmatch(r"(.*?) ?-> (.*?)(?: \[(\w+)\])?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a strategy; expected 'PLACEMENT, ... -> PLACEMENT, ...'")

    def side(part: str) -> tuple[Placement, ...]:
        return tuple(parse_placement(p) for p in re.findall(r"\w+(?:\([^)]*\))?", part))

    return Strategy(inputs=side(match[1]), outputs=side(match[2]), local=match[3] or "")


def can_split(size: int, degree: int, blocks: int = 1) -> bool:
    """Whether a dim can be split without an empty rank (and, within blocks, without a remainder)."""
    if blocks > 1:
        return size % (blocks * degree) == 0
    return size >= degree and (degree - 1) * -(-size // degree) < size


def local_range(size: int, degree: int, coordinate: int) -> tuple[int, int]:
    """Start and end of one rank's part of a dim, as ``torch.chunk`` splits it."""
    chunk = -(-size // degree)
    start = min(coordinate * chunk, size)
    return start, min(start + chunk, size)


def local_shape(shape: tuple[int, ...], placement: Placement, degree: int, coordinate: int) -> tuple[int, ...]:
    """Shape of one rank's part; ``coordinate`` is its place on the axis."""
    if not isinstance(placement, Shard):
        return shape
    dim = placement.dim
    if placement.blocks > 1:
        size = shape[dim] // degree
    else:
        start, end = local_range(shape[dim], degree, coordinate)
        size = end - start
    return (*shape[:dim], size, *shape[dim + 1 :])


class CollectiveKind(Enum):
    """What a group of ranks does together, by its NCCL name."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    SEND = "send"
    RECV = "recv"


_AR, _AG, _RS, _A2A = (
    CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL,
)  # fmt: skip


def redistribution(src: Placement, dst: Placement) -> tuple[CollectiveKind | None, CollectiveKind | None]:
    """Collectives that turn a value from ``src`` to ``dst``: in the forward pass, and in the backward pass.

    None means that the change is local (a slice, zeros on all ranks but the first, or nothing at all).
    """
    if src == dst:
        return None, None
    match src, dst:
        case Shard(), Shard():
            return _A2A, _A2A
        case Shard(), Replicate(partial_grad=True):
            return _AG, _RS
        case Shard(), Replicate():
            return _AG, None
        case Replicate(partial_grad=False), Shard():
            return None, _AG
        case Replicate(partial_grad=False), Replicate(partial_grad=True):
            return None, _AR
        case ((Shard() | Replicate()), (Shard() | Replicate() | Partial())):
            return None, None
        case Partial(), Shard():
            return _RS, _AG
        case Partial(), Replicate(partial_grad=True):
            return _AR, _AR
        case Partial(), Replicate():
            return _AR, None
    raise AssertionError(f"no redistribution from {src} to {dst}")
