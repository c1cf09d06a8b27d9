"""The ``autoplan`` command: its subcommands, one file each."""

import importlib.metadata
from typing import Annotated

import typer

from autoplan.cli.check import check
from autoplan.cli.diff import diff
from autoplan.cli.explain import explain
from autoplan.cli.recost import recost
from autoplan.cli.report import report
from autoplan.cli.search import search

app = typer.Typer(
    name="autoplan", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def main() -> None:
    """Entry point of the ``autoplan`` command."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"autoplan {importlib.metadata.version('autoplan')}")
        raise typer.Exit


@app.callback()
def _autoplan(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Plan how to train a PyTorch model on many devices, without changing the model.

    \b
    Examples:
      autoplan search examples/nanogpt.py --cluster 8xH100 -o plan.json
      autoplan report plan.json --html plan.html
      autoplan diff plan.json other.json
      autoplan check plan.json model.py --cluster 8xH100
      autoplan recost plan.json --seq-len 1024
      autoplan explain plan.json tp
    """


for command in (search, report, diff, check, recost, explain):
    app.command()(command)


if __name__ == "__main__":
    main()
