"""Time and cost of a training run as text."""

from autoplan.plan.money import BILL_NOTE, Bill, bill_pairs, bill_title, formula_pairs
from autoplan.plan.text import pairs_lines


def bill_text(bill: Bill) -> str:
    """The figures, and below them the formula of each with its inputs."""
    lines = [bill_title(bill), *pairs_lines(bill_pairs(bill)), "", *pairs_lines(formula_pairs(bill)), f"  {BILL_NOTE}"]
    return "\n".join(lines) + "\n"
