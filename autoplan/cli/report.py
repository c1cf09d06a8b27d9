"""``autoplan report``: a plan file in; words, rows or a page out."""

import os
from typing import Annotated

import typer

from autoplan.cli.answers import exit_codes, refuse_unwritable, write_output
from autoplan.cli.flags import OtherModel, Price, Tokens
from autoplan.cli.progress import planning_work
from autoplan.errors import InputError
from autoplan.plan.file import load_plan
from autoplan.plan.money import bill_of, parse_budget
from autoplan.plan.ops import OpPrice
from autoplan.plan.plan import Plan
from autoplan.report.bill import bill_text
from autoplan.report.html import report_html
from autoplan.report.ops import ops_json, ops_text
from autoplan.report.render import report_json, report_text
from autoplan.report.report import make_report
from autoplan.trace.collection import no_collection


def report(
    plan_file: Annotated[str, typer.Argument(metavar="PLAN", help="A file that autoplan search wrote.")],
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Also write one offline page with pictures.")] = None,
    tokens: Tokens = None,
    price: Price = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="List every op with FLOPs, bytes, time and source, worst first.")
    ] = False,
    most: Annotated[int, typer.Option(min=0, help="Rows of --ops in words; 0 for all.")] = 30,
    model: OtherModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows and totals as JSON on stdout.")] = False,
) -> None:
    """Explain a plan: stages, splits, predicted time and memory by cause, what lost and by how much.

    \b
    Examples:
      autoplan report plan.json
      autoplan report plan.json --html plan.html
      autoplan report plan.json --tokens 15T --price 2.5
      autoplan report plan.json --ops --most 50
    """
    with exit_codes():
        budget = parse_budget(tokens, price)
        plan = load_plan(plan_file)
        if ops:
            if html is not None or budget:
                raise InputError("--ops is a list of its own: ask for --html, --tokens and --price without it")
            found = _ops(plan, model)
            typer.echo(ops_json(found) if as_json else ops_text(plan, found, most or None), nl=False)
            return
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


def _ops(plan: Plan, model: str | None) -> tuple[OpPrice, ...]:
    with planning_work() as progress:
        with no_collection():
            from autoplan import examine  # loads torch, which a report can do without

        return examine.ops(plan, model=model, progress=progress)
