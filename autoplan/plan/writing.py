"""Text to disk without a half-written file, and JSON that a person can read."""

import json
import os
import secrets
import stat

_WIDTH = 110


def json_text(value: object) -> str:
    """JSON with whatever fits on one line kept there. Deterministic; ValueError on NaN or infinity."""
    return _lay_out(value, "") + "\n"


def _lay_out(value: object, indent: str) -> str:
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(flat) + len(indent) <= _WIDTH:
        return flat
    deeper = indent + "  "
    match value:
        case dict():
            rows = [f"{json.dumps(key, ensure_ascii=False)}: {_lay_out(item, deeper)}" for key, item in value.items()]
            return _block("{", rows, "}", indent)
        case list() if all(isinstance(item, str | int | float) for item in value):
            words = [json.dumps(item, ensure_ascii=False) for item in value]
            return _block("[", _fill(words, len(deeper)), "]", indent)
        case list():
            return _block("[", [_lay_out(item, deeper) for item in value], "]", indent)
        case _:
            return flat


def _block(opening: str, rows: list[str], closing: str, indent: str) -> str:
    return f"{opening}\n" + ",\n".join(f"{indent}  {row}" for row in rows) + f"\n{indent}{closing}"


def _fill(words: list[str], indent: int) -> list[str]:
    """Words joined by commas into rows that fit."""
    rows: list[str] = []
    for word in words:
        if rows and len(rows[-1]) + len(word) + indent + 3 <= _WIDTH:
            rows[-1] += f", {word}"
        else:
            rows.append(word)
    return rows


def write_text(path: str, text: str) -> None:
    """Write a file whole or not at all: an older one survives a full disk, a crash and Ctrl-C.

    Raises OSError that names ``path``, never the temporary file beside it.
    """
    try:
        if os.path.exists(path) and not stat.S_ISREG(os.stat(path).st_mode):
            _write_in_place(path, text)
        else:
            _write_beside(os.path.realpath(path), text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _write_in_place(path: str, text: str) -> None:
    """Devices and pipes cannot be replaced by a rename."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _write_beside(path: str, text: str) -> None:
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
