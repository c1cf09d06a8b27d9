"""What a cost is, not how it is estimated: the seam between the solver and the cost models.

Units: times in microseconds (``_us``), sizes in bytes.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from autoplan.cluster import Group
from autoplan.ir import Arg, TensorMeta, Token
from autoplan.sharding import CollectiveKind

WorkKind = Literal["matmul", "attention", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op as a device runs it: the same text means the same call, whatever the values are called."""

    op: str
    args: tuple[Arg, ...]
    """As in the graph, a value by its position among the operands: ``Token("value", "0")``."""
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[TensorMeta, ...]
    """Local shapes."""
    needs: tuple[bool, ...] = ()
    """Of a backward pass: per operand, whether its gradient is wanted. Empty for a forward pass."""

    def __str__(self) -> str:
        """Print as ``aten.linear.default(%0, %1) float32[8, 64] float32[64, 64] grads 11``."""
        args = [_text(arg) for arg in self.args] + [f"{name}={_text(arg)}" for name, arg in self.kwargs]
        grads = [f"grads {''.join(str(int(need)) for need in self.needs)}"] if self.needs else []
        return " ".join([f"{self.op}({', '.join(args)})", *map(str, self.operands), *grads])


def _text(arg: Arg) -> str:
    if isinstance(arg, tuple):
        return f"[{', '.join(map(_text, arg))}]"
    if isinstance(arg, Token):
        return f"%{arg.text}" if arg.kind == "value" else arg.text
    return repr(arg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one device does for one op in one direction.

    ``memory`` is work bound by memory traffic (elementwise ops, norms, copies). Views are no work at all.
    """

    kind: WorkKind
    flops: int
    num_bytes: int
    """Bytes read and written."""
    dtype: str
    launches: int = 1
    call: Call | None = None
    """The op it is the work of, for cost models that know its time; None where it is none of a graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective by one group.

    ``num_bytes`` is the whole buffer: what an all-reduce reduces, what an all-gather yields, what a reduce-scatter
    takes, what one rank hands to an all-to-all, a broadcast or a send.
    """

    kind: CollectiveKind
    num_bytes: int
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A time opened: what it is made of, and where the number that limits it comes from."""

    time_us: float
    efficiency: float
    """Share of it that the work would take at the device's peak and bandwidth."""
    limit: Literal["compute", "memory", "launch"]
    """What most of it goes to."""
    source: str
    """Of the number that stands for the limit: its key in the profile, kind and date."""


class CostModel(Protocol):
    """Prices work and communication. Pure: same input, same number; finite and >= 0; zero only for nothing.

    Half the work, or half the bytes, takes at least half as long: the bounds of the search rest on it.
    """

    def compute_us(self, work: Work) -> float:
        """Time of the work on one device."""
        ...

    def collective_us(self, collective: Collective) -> float:
        """Time of the collective, alone on its links; 0 for a group of one."""
        ...

    def overlap_loss(self) -> float:
        """Part of a collective's time, from 0 to 1, that the compute it hides behind loses to it."""
        ...

    def host_copy_us(self, num_bytes: int) -> float:
        """Time of one copy between a device and the memory of its node, one way; 0 for no bytes.

        Raises InputError where the hardware is not known to have such a link.
        """
        ...

    def peak_flops_per_s(self, dtype: str) -> float:
        """Matrix operations of one device at its best, for MFU; 0 where the dtype has no peak."""
        ...
