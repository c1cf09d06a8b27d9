"""What is measured: each case a value with a key, under which its time is kept. No torch.

Sizes are chosen for the curves of a profile: small and large squares, flat and thin products, short and long sequences,
buffers from below the caches to far beyond them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autoplan.cost import Call
from autoplan.ir import DTYPE_BYTES
from autoplan.sharding import CollectiveKind

DeviceKind = Literal["cpu", "cuda"]
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """(m, k) times (k, n), forward."""

    m: int
    n: int
    k: int
    dtype: str

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return f"matmul {self.m}x{self.n}x{self.k} {self.dtype}"

    @property
    def flops(self) -> int:
        """Operations of one product."""
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Causal attention, forward; q, k and v of (batch, heads, length, head)."""

    batch: int
    heads: int
    length: int
    head: int
    dtype: str

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return f"attention {self.batch}x{self.heads}x{self.length}x{self.head} {self.dtype}"

    @property
    def flops(self) -> int:
        """Operations of one call: half of the square is masked."""
        return 2 * self.batch * self.heads * self.length**2 * self.head


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """An op bound by memory traffic."""

    op: Literal["add", "gelu", "layer_norm"]
    num_bytes: int
    """Read and written."""
    dtype: str

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return f"{self.op} {self.num_bytes}B {self.dtype}"

    @property
    def num_elements(self) -> int:
        """Elements of the operand; an addition has two."""
        return max(1, self.num_bytes // (DTYPE_BYTES[self.dtype] * (3 if self.op == "add" else 2)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """The least an op costs: eight elements, with a gradient."""

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return "dispatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCopy:
    """A copy from the device to pinned memory of the host."""

    num_bytes: int

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return f"host copy {self.num_bytes}B"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One op of a model, on the shapes that a rank sees, with its work."""

    call: Call
    flops: int
    num_bytes: int

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return f"op {self.call}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A collective by all groups of this size at once; ``inside``: each rank computes before it, as in a step."""

    kind: CollectiveKind
    num_bytes: int
    ranks: int
    per_node: int
    inside: bool

    @property
    def key(self) -> str:
        """Name of the measurement."""
        where = "inside compute" if self.inside else "alone"
        return f"{self.kind.value} {self.num_bytes}B {self.ranks} ranks {self.per_node} per node {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A sum over all ranks, square products, or both beside each other: what each takes from the other."""

    part: Literal["transfer", "compute", "both"]
    num_bytes: int
    ranks: int
    per_node: int
    products: int
    side: int
    dtype: str

    @property
    def key(self) -> str:
        """Name of the measurement."""
        return f"{self.pair}: {self.part}"

    @property
    def pair(self) -> str:
        """What is run beside what."""
        return (
            f"all_reduce {self.num_bytes}B {self.ranks} ranks {self.per_node} per node beside {self.products} "
            f"products {self.side} {self.dtype}"
        )


Compute = Matmul | Attention | Stream | Dispatch | HostCopy | OpCase
Case = Compute | Transfer | Overlap

_KINDS = (
    CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL,
    CollectiveKind.BROADCAST, CollectiveKind.SEND,
)  # fmt: skip


def compute_cases(device: DeviceKind, quick: bool) -> Iterator[Compute]:
    """Ops by shape. ``quick`` takes a few small ones: enough for every number of a profile, and for a first look."""
    yield Dispatch()
    yield from _matmuls(device, quick)
    dtype = "float32" if device == "cpu" else "bfloat16"
    lengths = (64, 128) if quick else (64, 256, 512, 1024) if device == "cpu" else (512, 2048, 4096, 8192)
    for length in lengths:
        yield Attention(batch=2, heads=4 if device == "cpu" else 16, length=length, head=64, dtype=dtype)
    sizes = (4096, _MIB) if quick else (2**14, 2**17, _MIB, 8 * _MIB, 64 * _MIB)
    for op in ("add", "gelu", "layer_norm"):
        yield from (Stream(op=op, num_bytes=size, dtype=dtype) for size in sizes)
    if device == "cuda":
        yield from (Stream(op="add", num_bytes=size * _MIB, dtype=dtype) for size in (256, 1024))
        yield from (HostCopy(num_bytes=size) for size in (2**12, _MIB, 256 * _MIB))


def _matmuls(device: DeviceKind, quick: bool) -> Iterator[Matmul]:
    main = "float32" if device == "cpu" else "bfloat16"
    squares: tuple[int, ...] = (32, 128, 256) if quick else (32, 64, 128, 256, 512, 1024)
    thin: tuple[tuple[int, int, int], ...] = (
        (64, 256, 64), (256, 64, 1024), (1, 512, 512), (512, 512, 16), (2048, 128, 128), (256, 4096, 256),
    )  # fmt: skip
    if device == "cuda":
        squares = (512, 1024) if quick else (512, 1024, 2048, 4096, 8192, 16384)
        thin = ((2048, 2048, 512), (8192, 1024, 4096), (16, 8192, 8192), (4096, 11008, 4096), (8192, 50304, 4096))
    yield from (Matmul(m=size, n=size, k=size, dtype=main) for size in squares)
    if not quick:
        yield from (Matmul(m=m, n=n, k=k, dtype=main) for m, n, k in thin)
    others = ("float64", "bfloat16", "float16") if device == "cpu" else ("float16", "float32", "float64")
    size = squares[-1] // 4 if device == "cpu" else squares[-1] // 2
    yield from (Matmul(m=size, n=size, k=size, dtype=dtype) for dtype in others)


def transfer_cases(world: int, per_node: int, quick: bool) -> Iterator[Transfer]:
    """Collectives of neighbouring ranks, in groups of every size that divides the ranks; and across nodes, if any."""
    sizes = (2**10, 2**16) if quick else (2**10, 2**14, 2**17, 2**20, 2**22, 2**24)
    for ranks, in_node in groups(world, per_node):
        for kind in _KINDS:
            if kind is CollectiveKind.SEND and ranks > 2:
                continue
            for size in sizes:
                for inside in (False, True):
                    yield Transfer(kind=kind, num_bytes=size, ranks=ranks, per_node=in_node, inside=inside)


def overlap_cases(device: DeviceKind, world: int, per_node: int, quick: bool) -> Iterator[Overlap]:
    """Transfers beside products that take about as long."""
    small, large = ((2**20, 2, 256), (2**22, 2, 512)) if device == "cpu" else ((2**26, 2, 4096), (2**28, 6, 4096))
    dtype = "float32" if device == "cpu" else "bfloat16"
    parts: tuple[Literal["transfer", "compute", "both"], ...] = ("transfer", "compute", "both")
    for num_bytes, products, side in (small,) if quick else (small, large):
        for part in parts:
            yield Overlap(
                part=part, num_bytes=num_bytes, ranks=world, per_node=min(world, per_node), products=products,
                side=side, dtype=dtype,
            )  # fmt: skip


def groups(world: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Sizes of groups, with the ranks that share a node: neighbours, then one rank of each node."""
    for ranks in range(2, world + 1):
        if world % ranks == 0 and (per_node % ranks == 0 or ranks % per_node == 0):
            yield ranks, min(ranks, per_node)
    nodes = world // per_node
    if per_node > 1:
        yield from ((ranks, 1) for ranks in range(2, nodes + 1) if nodes % ranks == 0)


def members(world: int, ranks: int, in_node: int, per_node: int) -> list[list[int]]:
    """The ranks of every such group. Neighbours are next to each other, others one node apart."""
    if in_node == 1 and per_node > 1:
        return [
            [first * per_node + i + per_node * step for step in range(ranks)]
            for first in range(0, world // per_node, ranks)
            for i in range(per_node)
        ]
    return [list(range(first, first + ranks)) for first in range(0, world, ranks)]
