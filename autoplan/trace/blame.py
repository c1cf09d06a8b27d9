"""Which line of the user's code an op or an error comes from."""

import contextlib
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

_NOT_THE_USERS = (Path(torch.__file__).parent, Path(__file__).parent)


def line_of_op(stack_trace: str | None) -> str:
    """Line of user code in a node's recorded stack: ``model.py:31, in forward``; "" when unknown."""
    frames = []
    for line in (stack_trace or "").splitlines():
        text = line.strip()
        if text.startswith('File "') and text.count('"') >= 2:
            file, _, rest = text.removeprefix('File "').partition('"')
            number, _, function = rest.removeprefix(", line ").partition(", in ")
            frames.append((file, number, function))
    found = _innermost(frames)
    return f"{Path(found[0]).name}:{found[1]}, in {found[2]}" if found else ""


def line_of_error(error: BaseException) -> str:
    """Line of user code that an error passed through: ``/home/me/model.py:31, in forward``; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    found = _innermost([(frame.filename, str(frame.lineno), frame.name) for frame in frames])
    return f"{found[0]}:{found[1]}, in {found[2]}" if found else ""


def _innermost(frames: Sequence[tuple[str, str, str]]) -> tuple[str, str, str] | None:
    """Last frame in the user's own files, else the last one in a library other than torch."""
    outside = [frame for frame in frames if _is_outside_torch(frame[0])]
    own = [frame for frame in outside if "site-packages" not in Path(frame[0]).parts]
    return own[-1] if own else outside[-1] if outside else None


def _is_outside_torch(file: str) -> bool:
    path = Path(file)
    standard = path.is_relative_to(Path(contextlib.__file__).parent) and "site-packages" not in path.parts
    return not file.startswith("<") and not standard and not any(path.is_relative_to(f) for f in _NOT_THE_USERS)
