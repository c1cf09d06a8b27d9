"""Answers about one part of a plan, and about a plan on a given model and cluster, as data."""

from dataclasses import dataclass

from autoplan.cluster import Cluster
from autoplan.plan.plan import Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another way for the same part, all else as in the plan."""

    words: str
    step_us: float | None
    """Of the whole step; None where it cannot be."""
    peak_bytes: int | None
    """Of the fullest device; None where it cannot be."""
    reason: str
    """Why it was not chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why one part of a plan is as it is."""

    subject: str
    """``weight layers.*.mlp.w1.weight``, ``stage 3``, ``tp``."""
    chosen: str
    facts: tuple[tuple[str, str], ...]
    """What it does, costs and belongs to: name and words."""
    step_us: float
    """Of the plan."""
    peak_bytes: int
    """Of the plan's fullest device."""
    alternatives: tuple[Alternative, ...]
    """Cheapest first; those that cannot be last."""
    changes: tuple[str, ...]
    """What would change the choice."""
    terms: str = "all else as in the plan"
    """What the alternatives have in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Whether a plan is legal and fits."""

    model: str
    cluster: Cluster
    illegal: tuple[str, ...]
    """What is wrong, each with the place and the fix."""
    step_us: float | None
    """None where it is not legal."""
    memory: tuple[Amounts, ...]
    """Peak bytes of a device at each place of the pipeline, by cause; none where it is not legal."""
    cannot_run: tuple[str, ...]
    """What keeps this version from running it."""
    figures: str = ""
    """Whether the figures in the plan are those of today's cost model, in words; empty where that is not known."""
    degrees: tuple[tuple[str, str], ...] = ()
    """Per axis: the degrees that this model, cluster and batch allow, with the reason."""

    @property
    def over(self) -> tuple[int, ...]:
        """Places that need more memory than a device has."""
        limit = self.cluster.memory_bytes
        return tuple(place for place, amounts in enumerate(self.memory) if amounts.total > limit)

    @property
    def good(self) -> bool:
        """Whether it is legal and fits."""
        return not self.illegal and not self.over
