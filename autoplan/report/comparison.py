"""Searches on several clusters side by side: rows, and which cluster is best, as text and JSON."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.errors import Shortfall
from autoplan.plan.money import BILL_NOTE, Bill, Budget, bill_of, bill_title, duration_text, formula_pairs, money_text
from autoplan.plan.outcome import Outcome
from autoplan.plan.plan import Plan, SearchStatus
from autoplan.plan.rows import place_memory
from autoplan.plan.summary import mesh_words
from autoplan.plan.text import pairs_lines
from autoplan.plan.words import bytes_text, gap_text, rate_text, share_text, table, time_text
from autoplan.plan.writing import json_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plan of one cluster in figures."""

    label: str
    step_us: float
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None
    peak_bytes: float
    """Of the fullest device."""
    gap: float
    status: SearchStatus
    bill: Bill | None
    """None where nobody asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cluster, with its plan or the reason why there is none."""

    cluster: str
    num_devices: int
    limit_bytes: int
    found: Found | None
    reason: str
    shortfall: Shortfall | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All clusters in the order they were asked for."""

    rows: tuple[Row, ...]
    best: int | None
    """Index of the best row; None when no cluster has a plan."""
    best_by: str
    """``cost`` where prices are known, else ``step time``."""

    @property
    def best_words(self) -> str:
        """``cheapest`` or ``fastest``."""
        return "cheapest" if self.best_by == "cost" else "fastest"


def compare(outcomes: Sequence[Outcome], budgets: Sequence[Budget]) -> Comparison:
    """Rows of all clusters, one budget each. Raises InputError when tokens cannot be counted."""
    rows = tuple(_row(outcome, budget) for outcome, budget in zip(outcomes, budgets, strict=True))
    by_cost = all(budget.price is not None for budget in budgets)
    ranked = [
        (_step_cost(row.found) if by_cost else row.found.step_us, index)
        for index, row in enumerate(rows)
        if row.found is not None
    ]
    return Comparison(rows=rows, best=min(ranked)[1] if ranked else None, best_by="cost" if by_cost else "step time")


def _step_cost(found: Found) -> float:
    """What a step costs, in the price's currency: all clusters do the same work in a step."""
    assert found.bill is not None and found.bill.cost_per_hour is not None, "prices are known"
    return found.bill.cost_per_hour * found.step_us / 3.6e9


def _row(outcome: Outcome, budget: Budget) -> Row:
    return Row(
        cluster=str(outcome.cluster),
        num_devices=outcome.cluster.num_devices,
        limit_bytes=outcome.cluster.memory_bytes,
        found=None if outcome.plan is None else _found(outcome.plan, budget),
        reason=outcome.reason,
        shortfall=outcome.shortfall,
    )


def _found(plan: Plan, budget: Budget) -> Found:
    total = plan.step.total
    return Found(
        label=plan.choices[0].label if plan.choices else mesh_words(plan),
        step_us=total,
        samples_per_s=plan.batch_size / total * 1e6 if total else None,
        tokens_per_s=plan.tokens / total * 1e6 if total and plan.tokens else None,
        mfu=plan.mfu or None,
        peak_bytes=max(memory.total for memory in place_memory(plan)),
        gap=plan.proof.gap(total),
        status=plan.proof.status,
        bill=bill_of(plan, budget) if budget else None,
    )


def comparison_text(found: Comparison) -> str:
    """A table of figures, the plan or the reason of each cluster, and how the best one's cost comes about."""
    plans = [row.found for row in found.rows if row.found is not None]
    tokens = any(plan.tokens_per_s for plan in plans)
    bills = [plan.bill for plan in plans if plan.bill is not None]
    times, costs = (any(getattr(bill, name) is not None for bill in bills) for name in ("hours", "cost_per_hour"))
    cost = "cost" if times else "cost an hour"
    rate = "tokens/s" if tokens else "samples/s"
    header = ("cluster", "devices", "step", rate, "MFU", "memory", "of limit", "gap",
              *(("time",) * times), *((cost,) * costs))  # fmt: skip
    rows = [_cells(row, times, costs) for row in found.rows]
    lines = [f"{len(found.rows)} clusters", *table(header, rows, align="<" + ">" * (len(header) - 1))]
    lines += ["  gap: share of the step by which the optimum of the cost model may be better", ""]
    lines += ["Plans", *pairs_lines([(row.cluster, _plan_words(row)) for row in found.rows])]
    return "\n".join([*lines, *_best_lines(found)]) + "\n"


def _cells(row: Row, times: bool, costs: bool) -> tuple[str, ...]:
    found = row.found
    if found is None:
        return (row.cluster, f"{row.num_devices:,}", *("-",) * (6 + times + costs))
    rate = found.tokens_per_s or found.samples_per_s
    return (
        row.cluster,
        f"{row.num_devices:,}",
        time_text(found.step_us),
        rate_text(rate) if rate else "-",
        share_text(found.mfu) if found.mfu else "-",
        bytes_text(found.peak_bytes),
        share_text(found.peak_bytes / row.limit_bytes),
        gap_text(found.gap),
        *((_time(found.bill),) * times),
        *((_cost(found.bill),) * costs),
    )


def _time(bill: Bill | None) -> str:
    return "-" if bill is None or bill.hours is None else duration_text(bill.hours)


def _cost(bill: Bill | None) -> str:
    """Of the run, or of an hour where no tokens are given."""
    if bill is None or bill.cost_per_hour is None:
        return "-"
    return money_text(bill.cost_per_hour if bill.cost is None else bill.cost)


def _plan_words(row: Row) -> str:
    if row.found is not None:
        stopped = "" if row.found.status == "complete" else f" ({row.found.status}: best so far)"
        return row.found.label + stopped
    if row.shortfall is None:
        return f"no plan: {row.reason}"
    short, cause = row.shortfall, row.shortfall.by_cause[0][0] if row.shortfall.by_cause else "memory"
    ways = f"; what would make it fit: {'; '.join(short.remedies)}" if short.remedies else ""
    return (
        f"no plan fits: stage {short.stage} needs {bytes_text(short.needed_bytes)} of "
        f"{bytes_text(short.limit_bytes)}, short by {bytes_text(short.missing_bytes)}, most of it {cause}{ways}"
    )


def _best_lines(found: Comparison) -> list[str]:
    if found.best is None:
        return ["", "No plan fits any of the clusters."]
    row = found.rows[found.best]
    lines = ["", f"The {found.best_words} is {row.cluster}."]
    if row.found is not None and row.found.bill is not None:
        bill = row.found.bill
        lines += ["", bill_title(bill) + f" on {row.cluster}", *pairs_lines(formula_pairs(bill)), f"  {BILL_NOTE}"]
    return lines


def comparison_json(found: Comparison) -> str:
    """The same as JSON."""
    return json_text(dataclasses.asdict(found))
