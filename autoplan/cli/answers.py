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

from autoplan.errors import AutoplanError, InputError
from autoplan.plan.writing import write_text

INTERRUPTED = 130


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what a command raises into an exit code and words on stderr; a bug keeps its traceback."""
    try:
        yield
    except AutoplanError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted: no half-written file is left", err=True)
        raise typer.Exit(INTERRUPTED) from error
    except (typer.Exit, BrokenPipeError):
        raise
    except OSError as error:
        typer.echo(f"error: {error.filename or 'the output'}: {error.strerror or error}", err=True)
        raise typer.Exit(InputError.exit_code) from error
    except Exception as error:
        error.add_note("This is a bug in autoplan, not in your input: please report it with the lines above.")
        raise


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
        raise InputError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
