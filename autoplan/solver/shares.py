"""A value whose readers each pay a share of its moves, so that no table has to know all readers at once.

Where the shares of a placement add up to one, they never pay more than the value costs: the sum of such tables bounds
every answer from below, the higher the better the shares. The best ones are found by subgradient steps: readers that
want a placement in the cheapest answer get a larger share of it (Held and Karp, "The traveling-salesman problem and
minimum spanning trees: part II", 1971; the length of a step is Polyak's, 1969).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autoplan.solver.eliminate import Costs, Scope

Shares = npt.NDArray[np.float64]
"""Readers x placements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One such value."""

    tables: tuple[int, ...]
    """Number, among those of the moves, of each reader's table."""
    readers: tuple[int, ...]
    """Their variables."""
    wants: tuple[Costs, ...]
    """Per reader: its candidates x placements, 1 where it wants the value so."""
    producer: Scope
    of_state: tuple[int, ...]
    """Per state of the producer, the source."""
    moves: Costs
    """Sources x placements, in whole units."""

    def equal(self) -> Shares:
        """Every reader pays the same part."""
        count = len(self.readers)
        return np.full((count, self.moves.shape[1]), 1.0 / count)

    def costs(self, shares: Shares) -> list[Costs]:
        """The tables of the readers (candidates x states of the producer), in whole units."""
        paid = (np.floor((wants * mine) @ self.moves.T) for wants, mine in zip(self.wants, shares, strict=True))
        return [costs[:, self.of_state] for costs in paid]

    def slope(self, states: Sequence[int]) -> Shares:
        """How the least sum, reached in these states of all variables, grows with the shares; sums kept."""
        wanted = np.array([wants[states[reader]] for reader, wants in zip(self.readers, self.wants, strict=True)])
        source = self.of_state[states[self.producer[0]] if self.producer else 0]
        paid: Shares = wanted * self.moves[source]
        even: Shares = paid.mean(axis=0)
        return paid - even


def projected(shares: Shares) -> Shares:
    """The nearest shares that are not negative and add up to one for each placement (Held, Wolfe, Crowder 1974)."""
    descending = -np.sort(-shares, axis=0)
    excess = (np.cumsum(descending, axis=0) - 1.0) / np.arange(1, len(shares) + 1)[:, None]
    last = (descending > excess).sum(axis=0) - 1
    found: Shares = np.maximum(shares - excess[last, np.arange(shares.shape[1])], 0.0)
    sums: Shares = found.sum(axis=0)
    return found / sums
