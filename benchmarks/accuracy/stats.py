"""Predictions against measurements: errors, rank correlation and regret, by source."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from accuracy.price import Priced

FEWEST = 5
"""Runs of a group of which a rank correlation says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of a set of runs."""

    count: int
    mean_abs: float
    median_abs: float
    bias: float
    """Mean of predicted / measured - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How well predictions order the plans of a job."""

    groups: int
    """Jobs with at least ``FEWEST`` plans."""
    correlation: float | None
    """Mean Spearman correlation over them."""
    regret: float | None
    """Mean over all jobs with two plans or more: measured time of the predicted best over the best, less one."""
    worst_regret: float | None


def errors_of(pairs: Sequence[tuple[float, float]]) -> Errors | None:
    """Errors of (predicted, measured) pairs; None for none."""
    if not pairs:
        return None
    relative = [predicted / measured - 1 for predicted, measured in pairs]
    sizes = [abs(error) for error in relative]
    return Errors(count=len(pairs), mean_abs=mean(sizes), median_abs=median(sizes), bias=mean(relative))


def ranking_of(priced: Iterable[Priced]) -> Ranking:
    """Order within jobs."""
    jobs: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for one in priced:
        assert one.run.step_s is not None
        jobs[one.run.group].append((one.step_s, one.run.step_s))
    several = [pairs for pairs in jobs.values() if len(pairs) > 1]
    many = [pairs for pairs in several if len(pairs) >= FEWEST]
    regrets = [min(pairs)[1] / min(measured for _, measured in pairs) - 1 for pairs in several]
    return Ranking(
        groups=len(many),
        correlation=mean(spearman(pairs) for pairs in many) if many else None,
        regret=mean(regrets) if regrets else None,
        worst_regret=max(regrets) if regrets else None,
    )


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Rank correlation, ties given their mean rank; 0 where one side is constant."""
    left, right = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    centre = (len(pairs) - 1) / 2
    products = sum((a - centre) * (b - centre) for a, b in zip(left, right, strict=True))
    spread = sum((a - centre) ** 2 for a in left) * sum((b - centre) ** 2 for b in right)
    return products / spread**0.5 if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]
