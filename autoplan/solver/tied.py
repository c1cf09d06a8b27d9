"""Parameters that several segments read, where it does not depend on the cut which of these a stage holds together.

With one stage, that holds them all. With several, the first and the last segment, as an embedding and a tied head, are
on different ones. Such parameters are priced with their segments, exactly as ``stagecost`` does; the others are left to
the chain as ``SharedParam``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autoplan.ir import SegmentedGraph
from autoplan.plan.memory import ParamBytes
from autoplan.solver.chain import OptionCost
from autoplan.solver.dataranks import time_us
from autoplan.solver.setting import Setting
from autoplan.solver.stagecost import held_collectives, in_class, param_of, tied_us
from autoplan.solver.tables import Option, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Which parameters a segment is priced with, named as in the first segment of its class."""

    owned: tuple[str, ...]
    held: tuple[str, ...] = ()
    """Those of them that its stage gathers, since a later segment reads them too."""
    tied: tuple[str, ...] = ()
    """Those of them that one other stage holds too."""


def settled_params(sg: SegmentedGraph, num_stages: int) -> tuple[str, ...]:
    """Shared parameters whose holders follow from the number of stages alone, each read by segments without a twin."""
    last = len(sg.segments) - 1
    lengths = [len(list(run)) for _, run in groupby(segment.kind for segment in sg.segments)]
    alone = {index for index, length in _starts(lengths) if length == 1}
    found = []
    for name in sg.shared_params:
        readers = [index for index, segment in enumerate(sg.segments) if name in segment.params]
        if alone.issuperset(readers) and (num_stages == 1 or readers == [0, last]):
            found.append(name)
    return tuple(found)


def _starts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    starts = [sum(lengths[:run]) for run in range(len(lengths))]
    return list(zip(starts, lengths, strict=True))


def ownership(sg: SegmentedGraph, index: int, length: int, settled: Sequence[str], num_stages: int) -> Ownership:
    """What a segment of the run of ``length`` that starts at ``index`` is priced with."""
    segments, first = sg.segments[index : index + length], sg.representative(sg.segments[index].kind).params
    shared = set(sg.shared_params)
    alone = [name for place, name in enumerate(first) if not all(s.params[place] in shared for s in segments)]
    earlier = {name for segment in sg.segments[:index] for name in segment.params} if num_stages == 1 else set()
    names = [name for name in segments[0].params if name in settled and name not in earlier]
    mine = set(in_class(sg, index, names))
    ordered = tuple(name for name in first if name in mine)
    return Ownership(
        owned=tuple(name for name in first if name in mine or name in alone),
        held=ordered if num_stages == 1 else (),
        tied=ordered if num_stages > 1 else (),
    )


def with_tied(setting: Setting, cost: OptionCost, option: Option, tied: Sequence[str]) -> OptionCost:
    """The price with summing the gradients of tied parameters with the other stage."""
    extra = sum(tied_us(setting, param_of(setting, option, name), 2) for name in tied)
    return replace(cost, end_us=cost.end_us + extra)


def with_held(cost: OptionCost, setting: Setting, params: ParamBytes) -> OptionCost:
    """The price with gathering, and keeping gathered, what several segments of the one stage read."""
    held = held_collectives(setting, params)
    forward = time_us(setting, held, "forward")
    return replace(
        cost,
        time_us=cost.time_us + forward + time_us(setting, held, "backward"),
        forward_us=cost.forward_us + forward,
        end_us=cost.end_us + time_us(setting, held, "last backward"),
        state_bytes=cost.state_bytes + (params.gathered if setting.data_axis.gathers else 0),
    )


def stage_bytes(setting: Setting, table: Table, settled: Sequence[str]) -> ParamBytes:
    """All that the one stage holds for several segments; every option places it alike."""
    sg, total = setting.sg, ParamBytes()
    for name in settled if setting.point.num_stages == 1 else ():
        index = next(i for i, segment in enumerate(sg.segments) if name in segment.params)
        option = table.options[sg.segments[index].kind][0]
        total += param_of(setting, option, *in_class(sg, index, (name,)))
    return total
