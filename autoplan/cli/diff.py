"""``autoplan diff``: two plan files in, what differs out; exit codes as those of ``diff``."""

from typing import Annotated

import typer

from autoplan.cli.answers import exit_codes
from autoplan.plan.diff import diff_plans
from autoplan.plan.file import load_plan
from autoplan.report.difference import diff_json, diff_text

DIFFERENT = 1


def diff(
    left_file: Annotated[str, typer.Argument(metavar="A", help="A file that autoplan search wrote.")],
    right_file: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the differences as JSON on stdout.")] = False,
) -> None:
    """Compare two plans: choices, stages, recompute, weights, predicted time and memory, communication.

    \b
    Examples:
      autoplan diff plan.json other.json
      autoplan diff old.json new.json --json

    \b
    Exit codes, as those of diff: 0 alike, 1 different, 2 trouble.
    """
    with exit_codes():
        left, right = load_plan(left_file), load_plan(right_file)
        text = diff_json(left, right) if as_json else diff_text(left, right, (left_file, right_file))
        typer.echo(text, nl=False)
        if diff_plans(left, right):
            raise typer.Exit(DIFFERENT)
