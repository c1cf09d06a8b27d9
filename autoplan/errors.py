"""Every error autoplan raises on purpose, in one tree.

AutoplanError
├── InputError        bad usage or input: a file, a flag, a model, a plan      exit code 2
│   ├── TraceError    the model could not be turned into a graph
│   ├── RuleError     an op, or a use of it, that no sharding rule covers
│   └── PlanError     a plan file that is broken or belongs to something else
└── InfeasibleError   no plan fits the cluster                                 exit code 3

``InputError`` is a ``ValueError`` as well, so code that knows nothing of autoplan can catch it.
Bugs of our own are plain ``assert``s and are never caught.
"""

from dataclasses import dataclass


class AutoplanError(Exception):
    """Base of everything autoplan raises on purpose."""

    exit_code = 1


class InputError(AutoplanError, ValueError):
    """The caller gave something that cannot be used; the message says what to change."""

    exit_code = 2


class TraceError(InputError):
    """The model could not be turned into a graph."""


class RuleError(InputError):
    """An op, or a way of using it, that no sharding rule covers."""


class PlanError(InputError):
    """A plan that is broken, or that belongs to another model, cluster or world size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Why the nearest candidate does not fit: one stage and its missing bytes."""

    stage: int
    needed_bytes: int
    limit_bytes: int
    by_cause: tuple[tuple[str, int], ...]
    """Bytes by cause on that stage, largest first."""
    remedies: tuple[str, ...]
    """What would make the job fit, cheapest first, in words."""

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the stage exceeds its limit."""
        return self.needed_bytes - self.limit_bytes


class InfeasibleError(AutoplanError):
    """No plan fits. ``shortfall`` is None when no candidate was legal at all."""

    exit_code = 3

    def __init__(self, message: str, shortfall: Shortfall | None = None) -> None:
        """Keep the numbers beside the words."""
        super().__init__(message)
        self.shortfall = shortfall
