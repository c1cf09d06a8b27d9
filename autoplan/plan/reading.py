"""Strict access to parsed JSON: every value knows its path, and every error names it.

A path is written as one would type it: ``stages[1].layouts[3]``, ``parameters["h.*.attn.weight"]``.
"""

import difflib
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from autoplan.errors import PlanError
from autoplan.plan.plan import Amounts
from autoplan.sharding import Placement, Strategy, parse_placement, parse_strategy

_Choice = TypeVar("_Choice", bound=str)

_KINDS = {
    dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a whole number", float: "a number",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """A JSON value and where it stands in its file; the path of the whole is empty."""

    path: str
    value: object

    def key(self, key: str, value: object) -> "Place":
        """The member of that name."""
        if not re.fullmatch(r"\w+", key):
            return Place(f"{self.path}[{json.dumps(key)}]", value)
        return Place(f"{self.path}.{key}" if self.path else key, value)


def fail(place: Place, message: str) -> NoReturn:
    """Raise the PlanError for this place."""
    raise PlanError(f"{place.path}: {message}" if place.path else message)


def did_you_mean(word: str, known: Collection[str]) -> str:
    """The end of a sentence: ``; did you mean 'schedule'?``, or a full stop when no known word is near."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


def _expected(place: Place, what: str) -> NoReturn:
    found = "null" if place.value is None else _KINDS.get(type(place.value), type(place.value).__name__)
    shown = f" ({json.dumps(place.value)[:60]})" if isinstance(place.value, str | int | float | bool) else ""
    fail(place, f"expected {what}, found {found}{shown}")


def entries(place: Place) -> Iterator[tuple[str, Place]]:
    """Members of an object whose keys are free, in file order."""
    if not isinstance(place.value, dict):
        _expected(place, "an object")
    for key, value in place.value.items():
        yield key, place.key(key, value)


def members(place: Place, names: tuple[str, ...]) -> dict[str, Place]:
    """Members of an object that has exactly these keys."""
    found = dict(entries(place))
    for key in found:
        if key not in names:
            near, known = did_you_mean(key, names), ", ".join(names)
            fail(place, f"unknown key {key!r}{near} Remove or rename it; known keys: {known}")
    for name in names:
        if name not in found:
            fail(place, f"missing key {name!r}: add it, or search again to get a complete plan")
    return found


def items(place: Place) -> tuple[Place, ...]:
    """Items of a list."""
    if not isinstance(place.value, list):
        _expected(place, "a list")
    return tuple(Place(f"{place.path}[{i}]", value) for i, value in enumerate(place.value))


def text(place: Place) -> str:
    """A string."""
    if not isinstance(place.value, str):
        _expected(place, "text")
    if not is_text(place.value):
        fail(place, "holds half of a UTF-16 pair, which is no character: write it anew")
    return place.value


def is_text(word: str) -> bool:
    """Whether it can be printed and saved: JSON escapes can spell halves of UTF-16 pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in word)


def whole(place: Place, least: int = 0, bits: int = 63) -> int:
    """A whole number, at least ``least``, of at most ``bits`` bits."""
    if not isinstance(place.value, int) or isinstance(place.value, bool):
        _expected(place, "a whole number")
    if not least <= place.value < 2**bits:
        fail(place, f"expected a whole number from {least} to 2**{bits} - 1, found {place.value}")
    return place.value


def number(place: Place) -> float:
    """A number >= 0 of a size that sums cannot overflow."""
    if not isinstance(place.value, int | float) or isinstance(place.value, bool):
        _expected(place, "a number")
    if not 0 <= place.value < 1e100:
        fail(place, f"expected a number from 0 to 1e100, found {place.value}")
    return place.value


def flag(place: Place) -> bool:
    """True or false."""
    if not isinstance(place.value, bool):
        _expected(place, "true or false")
    return place.value


def optional_text(place: Place) -> str | None:
    """A string or null."""
    return None if place.value is None else text(place)


def optional_whole(place: Place) -> int | None:
    """A whole number or null."""
    return None if place.value is None else whole(place)


def amounts(place: Place) -> Amounts:
    """Numbers by cause."""
    return Amounts(by_cause=tuple((cause, number(item)) for cause, item in entries(place)))


def pair(place: Place) -> tuple[str, str]:
    """A name and a text."""
    found = tuple(text(item) for item in items(place))
    if len(found) != 2:
        fail(place, f'expected a name and a text, such as ["dtype", "bf16"], found {len(found)} items')
    return found[0], found[1]


def choice(place: Place, options: tuple[_Choice, ...]) -> _Choice:
    """One of a few words."""
    word = text(place)
    for option in options:
        if option == word:
            return option
    fail(place, f"expected one of {', '.join(options)}, found {word!r}")


def placement(place: Place) -> Placement:
    """A placement in its text form."""
    try:
        return parse_placement(text(place))
    except ValueError as error:
        fail(place, str(error))


def strategy(place: Place) -> Strategy:
    """A strategy in its text form."""
    written = text(place)
    try:
        found = parse_strategy(written)
    except ValueError as error:
        fail(place, str(error))
    if "".join(str(found).split()) != "".join(written.split()):
        fail(place, f"{written!r} is not a strategy: only {str(found)!r} of it can be read")
    return found
