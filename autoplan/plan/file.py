"""Plan <-> JSON file. Plain data that a person can read and edit.

``plan_from_json(plan_to_json(plan)) == plan``, and equal plans give equal bytes.
"""

import json
from typing import NoReturn

from autoplan.errors import PlanError
from autoplan.plan.decode import plan_from_json
from autoplan.plan.encode import plan_to_json
from autoplan.plan.plan import Plan
from autoplan.plan.reading import is_text
from autoplan.plan.writing import json_text, write_text

__all__ = ["load_plan", "plan_from_json", "plan_json", "plan_to_json", "save_plan"]


def plan_json(plan: Plan) -> str:
    """The plan as the text of its file."""
    return json_text(plan_to_json(plan))


def save_plan(plan: Plan, path: str) -> None:
    """Write a plan, whole or not at all. Raises OSError that names ``path``."""
    write_text(path, plan_json(plan))


def load_plan(path: str) -> Plan:
    """Read and verify a plan. Raises PlanError that names the file, the place in it and the fix."""
    try:
        with open(path, encoding="utf-8") as file:
            written = file.read()
    except OSError as error:
        raise PlanError(
            f"cannot read the plan {path}: {error.strerror}. "
            "`autoplan search MODEL --cluster SPEC -o plan.json` writes one"
        ) from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path}: not a plan: byte {error.start} is not UTF-8 text") from error
    try:
        return plan_from_json(_parse(written))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _parse(written: str) -> object:
    try:
        return json.loads(written, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise PlanError(f"line {error.lineno} column {error.colno}: broken JSON: {error.msg}") from error
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"not a plan: {error}") from error
    except RecursionError as error:
        raise PlanError("not a plan: nested too deeply") from error


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise PlanError(f"the key {key!r} stands twice in one object: remove one")
        if not is_text(key):
            raise PlanError(f"the key {key!r} holds half of a UTF-16 pair, which is no character: write it anew")
        found[key] = value
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise PlanError(f"{word} is not a number that a plan may hold: write a finite one")
