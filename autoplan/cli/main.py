"""The ``autoplan`` command: its subcommands, one file each."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

COMMANDS = ("search", "report", "diff", "check", "recost", "explain", "profile")
"""Each in the file of its name."""


def main() -> None:
    """Entry point of the ``autoplan`` command."""
    asked = sys.argv[1:2]
    make_app(asked if set(asked) <= set(COMMANDS) else COMMANDS)()


def make_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """The command with some of its subcommands; the files of the others are not loaded."""
    app = typer.Typer(
        name="autoplan",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=_autoplan,
    )
    for name in commands or COMMANDS:
        app.command()(getattr(import_module(f"autoplan.cli.{name}"), name))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # half as slow as all the rest of the command line

        typer.echo(f"autoplan {importlib.metadata.version('autoplan')}")
        raise typer.Exit


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
      autoplan profile --ranks 4 -o local.toml
    """


if __name__ == "__main__":
    main()
