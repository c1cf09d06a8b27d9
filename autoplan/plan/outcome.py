"""What a search on one of several clusters came to, or one for the fewest devices."""

from dataclasses import dataclass

from autoplan.cluster import Cluster
from autoplan.errors import Shortfall
from autoplan.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A plan, or the reason why there is none."""

    cluster: Cluster
    plan: Plan | None = None
    reason: str = ""
    """Why there is no plan, in words; empty when there is one."""
    shortfall: Shortfall | None = None
    """What is short where memory is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of devices, and whether the job fits there."""

    cluster: Cluster
    fits: bool
    reason: str = ""
    """Why not, where no mesh was possible at all."""
    shortfall: Shortfall | None = None
    """By how much the nearest plan misses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The answer, and what was tried for it."""

    cluster: Cluster
    tried: tuple[Tried, ...]
    """By number of devices."""

    @property
    def limiter(self) -> Tried | None:
        """The largest number of devices that was tried and is too small."""
        small = [tried for tried in self.tried if not tried.fits]
        return small[-1] if small else None
