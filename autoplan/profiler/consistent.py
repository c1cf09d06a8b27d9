"""Times of one op at many shapes, without the noise that contradicts itself. No torch.

A shape that is no larger in any dim takes no longer, and at least its share of the work: ``cost.CostModel`` demands it,
and the bounds of a search rest on it. Whatever else a machine does only adds time, so the longer of two times that
contradict each other is lowered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from autoplan.profiler.cases import OpCase

_PASSES = 20


@dataclass(slots=True)
class _Timed:
    case: OpCase
    us: float


def consistent(timed: Sequence[tuple[OpCase, float]]) -> dict[str, float]:
    """Times by ``cost.Call`` as text."""
    found = [_Timed(case=case, us=us) for case, us in sorted(timed, key=lambda pair: (_family(pair[0]), pair[0].key))]
    for _, group in groupby(found, key=lambda item: _family(item.case)):
        _lower(list(group))
    return {str(item.case.call): item.us for item in found}


def _family(case: OpCase) -> str:
    """What ops have in common that differ in sizes only."""
    call = case.call
    return f"{call.op} {call.needs} {[(len(meta.shape), meta.dtype) for meta in call.operands]}"


def _lower(group: list[_Timed]) -> None:
    """Until nothing contradicts: each time only falls, and there is one below which it does not."""
    pairs = [(small, large) for small in group for large in group if small is not large and _is_within(small, large)]
    for _ in range(_PASSES):
        changed = False
        for small, large in pairs:
            share = _share(small.case, large.case)
            if small.us > large.us * (1 + 1e-9):
                small.us, changed = large.us, True
            if share > 0 and large.us * share > small.us * (1 + 1e-9):
                large.us, changed = small.us / share, True
        if not changed:
            return


def _is_within(small: _Timed, large: _Timed) -> bool:
    """Whether no dim is larger."""
    metas = zip(small.case.call.operands, large.case.call.operands, strict=True)
    return all(a <= b for mine, theirs in metas for a, b in zip(mine.shape, theirs.shape, strict=True))


def _share(small: OpCase, large: OpCase) -> float:
    """The part of the larger one's operations, or of its bytes, that the smaller one has: the least of the two."""
    pairs = ((small.flops, large.flops), (small.num_bytes, large.num_bytes))
    return min((a / b for a, b in pairs if b), default=0.0)
