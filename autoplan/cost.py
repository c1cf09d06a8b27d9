"""What a cost is, not how it is estimated: the seam between the solver and the cost models.

Units: times in microseconds (``_us``), sizes in bytes.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from autoplan.cluster import Group
from autoplan.sharding import CollectiveKind

WorkKind = Literal["matmul", "attention", "memory"]


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
