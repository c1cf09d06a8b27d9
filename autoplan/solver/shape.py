"""The tables of one value apart from prices: who makes and reads it, in which placements, and so which moves it needs.

Sets of placements are bit masks, so a table is a product: (what is wanted, as vectors of 0 and 1) x (cost of a move).
Values of equal shape differ in sizes only: each shape is worked out once and kept by the axis.
"""

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from autoplan.sharding import Placement
from autoplan.solver.eliminate import Costs, Scope

MOST_READERS = 2
"""More readers than these meet in a hub."""
HUB = -1
"""In a scope: the hub of the value, a variable that the network adds."""

Flags = npt.NDArray[np.bool_]
Masks = npt.NDArray[np.int64]
Places = tuple[Placement, ...]
Reader = tuple[int, tuple[Places, ...]]
"""A node, and for each position at which it reads the value the placement that each of its candidates wants."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetsOf:
    """Per state of the variables in ``scope``, a set of placements."""

    scope: Scope
    masks: Masks


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Tables of moves: what is wanted in each state of the variables of ``scope`` (states x placements)."""

    scope: Scope
    members: Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveParts:
    """What the tables of a value's moves are made from."""

    hub_states: int
    """Of its hub; 0 without one."""
    lacks: tuple[tuple[Scope, Costs], ...]
    """Infinite where the hub lacks what a reader wants."""
    wanted: tuple[Wanted, ...]
    """Each to be paid in full."""
    shared: tuple[Wanted, ...]
    """By reader, to be paid in shares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueShape:
    """The shape of one value's tables."""

    number: int
    """Which of the axis's shapes it is."""
    producer: Scope
    """Its variable; none when the value always arrives the same way."""
    sources: Places
    of_state: tuple[int, ...]
    """Per state of the producer, an index into ``sources``."""
    bits: Mapping[Placement, int]
    """Bit of each placement that is wanted."""
    leaving: int
    """Bits of the placements in which it leaves."""
    readers: tuple[int, ...]
    """Nodes that read it, each once."""
    wants: tuple[Masks, ...]
    """Per reader and candidate."""
    parts: dict[bool, MoveParts] = field(default_factory=dict, repr=False, compare=False)

    def move_parts(self, relaxed: bool) -> MoveParts:
        """What the tables of its moves are made from."""
        if relaxed not in self.parts:
            self.parts[relaxed] = _move_parts(self, relaxed)
        return self.parts[relaxed]


def make_shape(number: int, producer: Scope, made: Places, readers: Sequence[Reader], leaving: Places) -> ValueShape:
    """``made`` is the placement of the value per state of its producer."""
    sources = tuple(dict.fromkeys(made))
    wanted = [list(zip(*positions, strict=True)) for _, positions in readers]
    places = dict.fromkeys(place for reader in wanted for candidate in reader for place in candidate)
    bits = {place: 1 << i for i, place in enumerate(places | dict.fromkeys(leaving))}
    return ValueShape(
        number=number,
        producer=producer,
        sources=sources,
        of_state=tuple(map(sources.index, made)),
        bits=bits,
        leaving=sum(bits[place] for place in dict.fromkeys(leaving)),
        readers=tuple(number for number, _ in readers),
        wants=tuple(masks_of(bits, reader) for reader in wanted),
    )


def masks_of(bits: Mapping[Placement, int], sets: Iterable[Iterable[Placement]]) -> Masks:
    """Sets as masks."""
    return np.array([functools.reduce(operator.or_, (bits[p] for p in places), 0) for places in sets], dtype=np.int64)


def members_of(masks: Masks, count: int) -> Costs:
    """Masks as vectors of 0 and 1, along a new last axis."""
    return ((masks[..., None] >> np.arange(count)) & 1).astype(np.float64)


def union_of(parts: Sequence[SetsOf]) -> SetsOf:
    """Per state of all their variables, all that any part holds."""
    masks = functools.reduce(np.bitwise_or.outer, (part.masks for part in parts), np.array(0))
    return SetsOf(scope=tuple(v for part in parts for v in part.scope), masks=masks)


def hub_masks(parts: Sequence[SetsOf]) -> Masks:
    """Every union that the parts can have: the states of a hub."""
    states = [0]
    for part in parts:
        mine = dict.fromkeys(part.masks.ravel().tolist())
        states = list(dict.fromkeys(old | new for old in states for new in mine))
    return np.array(states)


def lacking(parts: Sequence[SetsOf], hub: Masks, variable: int) -> tuple[tuple[Scope, Costs], ...]:
    """Tables that forbid a hub to lack what a part holds."""
    lacks = (np.bitwise_and.outer(part.masks, ~hub) != 0 for part in parts)
    return tuple(
        ((*part.scope, variable), np.where(each, np.inf, 0.0)) for part, each in zip(parts, lacks, strict=True)
    )


def _move_parts(shape: ValueShape, relaxed: bool) -> MoveParts:
    count, leaving = len(shape.bits), SetsOf(scope=(), masks=np.array(shape.leaving))
    readers = (
        SetsOf(scope=(number,), masks=masks & ~shape.leaving)
        for number, masks in zip(shape.readers, shape.wants, strict=True)
    )
    some = [part for part in readers if part.masks.any()]
    full, shared, hub = [leaving], list[SetsOf](), np.array([])
    lacks: tuple[tuple[Scope, Costs], ...] = ()
    if len(some) <= MOST_READERS:
        full += [union_of(some)] if some else []
    elif relaxed:
        shared = some
    else:
        hub = hub_masks(some)
        lacks = lacking(some, hub, HUB)
        full.append(SetsOf(scope=(HUB,), masks=hub))
    return MoveParts(
        hub_states=len(hub),
        lacks=lacks,
        wanted=tuple(Wanted(scope=part.scope, members=members_of(part.masks, count)) for part in full),
        shared=tuple(Wanted(scope=part.scope, members=members_of(part.masks, count)) for part in shared),
    )
