"""``autoplan report``: a plan file in; words, rows or a page out."""

import os
from typing import Annotated

import typer

from autoplan.cli.answers import exit_codes, refuse_unwritable, write_output
from autoplan.cli.flags import Price, Tokens
from autoplan.errors import InputError
from autoplan.plan.file import load_plan
from autoplan.plan.money import bill_of, parse_budget
from autoplan.report.bill import bill_text
from autoplan.report.html import report_html
from autoplan.report.render import report_json, report_text
from autoplan.report.report import make_report


def report(
    plan_file: Annotated[str, typer.Argument(metavar="PLAN", help="A file that autoplan search wrote.")],
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Also write one offline page with pictures.")] = None,
    tokens: Tokens = None,
    price: Price = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows and totals as JSON on stdout.")] = False,
) -> None:
    """Explain a plan: stages, splits, predicted time and memory by cause, what lost and by how much.

    \b
    Examples:
      autoplan report plan.json
      autoplan report plan.json --html plan.html
      autoplan report plan.json --tokens 15T --price 2.5
    """
    with exit_codes():
        budget = parse_budget(tokens, price)
        plan = load_plan(plan_file)
        bill = bill_of(plan, budget) if budget else None
        if html is not None:
            refuse_unwritable(html)
            if os.path.exists(html) and os.path.samefile(html, plan_file):
                raise InputError(f"--html {html} would overwrite the plan: name another file")
            write_output(html, report_html(plan, bill))
        words = report_text(plan) + (f"\n{bill_text(bill)}" if bill is not None else "")
        typer.echo(report_json(make_report(plan, bill)) if as_json else words, nl=False)
        if html is not None:
            typer.echo(f"\nThe page was written to {html}", err=as_json)
