"""How a command ends: exit code and words for every error, and files written whole or not at all.

0    done
2    bad usage or input, or a file that cannot be written
3    no plan fits
130  Ctrl-C
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from autoplan.errors import AutoplanError, InfeasibleError, InputError, Shortfall
from autoplan.plan.words import bytes_text
from autoplan.plan.writing import write_text

INTERRUPTED = 130


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what a command raises into an exit code and words on stderr; a bug keeps its traceback."""
    try:
        yield
    except AutoplanError as error:
        typer.echo(error_text(error), err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted: no half-written file is left", err=True)
        raise typer.Exit(INTERRUPTED) from error
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:
        error.add_note("This is a bug in autoplan, not in your input: please report it with the lines above.")
        raise


def error_text(error: AutoplanError) -> str:
    """``error: message``, and for an infeasible job what is missing and what would help."""
    lines = [f"error: {error}"]
    if isinstance(error, InfeasibleError) and error.shortfall is not None:
        lines += _shortfall_lines(error.shortfall)
    return "\n".join(lines)


def _shortfall_lines(shortfall: Shortfall) -> list[str]:
    width = max((len(cause) for cause, _ in shortfall.by_cause), default=0)
    return [
        f"  stage {shortfall.stage} needs  {_exact(shortfall.needed_bytes)}",
        f"  a device has   {_exact(shortfall.limit_bytes)}",
        f"  short by       {_exact(shortfall.missing_bytes)}",
        "  what it needs it for:",
        *(f"    {cause:<{width}}  {_exact(num_bytes)}" for cause, num_bytes in shortfall.by_cause),
        "  what would make it fit:",
        *(f"    - {remedy}" for remedy in shortfall.remedies or ("nothing that was tried",)),
    ]


def _exact(num_bytes: int) -> str:
    return f"{bytes_text(num_bytes):>9} ({num_bytes:,} bytes)"


def refuse_unwritable(path: str) -> None:
    """Raise InputError when a file at ``path`` could not be written: better before the work than after it."""
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path):
        raise InputError(f"cannot write {path}: it is a folder; name a file in it")
    if not os.path.isdir(folder):
        raise InputError(f"cannot write {path}: there is no folder {folder}; make it, or choose another place")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise InputError(f"cannot write {path}: permission denied; choose another place")


def write_output(path: str, text: str) -> None:
    """Write a result. Raises InputError that says what the system said; an older file survives."""
    try:
        write_text(path, text)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; free space or choose another place"
        ) from error
