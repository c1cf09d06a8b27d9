"""Measurements on disk as they come, one line each: a run that was interrupted goes on where it stopped.

Every line has the fingerprint of where it was measured, so one file serves several machines and numbers of ranks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoplan.errors import InputError

Place = Mapping[str, str]
"""Device, processor, driver, torch, threads and ranks, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Times by key of the case, for one place; None: it was too large, or cannot be run by itself."""

    path: Path
    place: str
    times: dict[str, float | None] = field(default_factory=dict)

    def add(self, key: str, us: float | None) -> None:
        """Keep a time, on disk at once."""
        self.times[key] = us
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"place": self.place, "key": key, "us": us}) + "\n")


def fingerprint(place: Place) -> str:
    """One text for a place; equal for equal places only."""
    return json.dumps(dict(sorted(place.items())))


def open_cache(path: Path, place: Place, *, fresh: bool = False) -> Cache:
    """What is known of this place; nothing when ``fresh``. A last line that was cut off is left out."""
    cache = Cache(path=path, place=fingerprint(place))
    if fresh or not path.exists():
        return cache
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            here = entry["place"] == cache.place
            key, us = entry["key"], entry["us"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                path.write_text("".join(f"{kept}\n" for kept in lines[:-1]), encoding="utf-8")
                break
            raise InputError(f"{path}, line {number}, is not a measurement: {line!r:.100}; delete the file") from error
        if here:
            cache.times[key] = us
    return cache
