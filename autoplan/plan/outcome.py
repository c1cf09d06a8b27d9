"""What a search on one of several clusters came to."""

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
