"""What the context axis costs beside the local work: collectives of one microbatch, and memory of what they bring.

Sizes are those after the tensor split: keys whose heads are split over the tensor axis are gathered at that part of
their size. The gradients of parameters, and the loss, are summed over the axis once a step together with the data
ranks, and are no part of this. Cutting a whole value of the prelude is local and happens once for all segments.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from autoplan.cluster import Group
from autoplan.cost import Collective
from autoplan.ir import DTYPE_BYTES
from autoplan.plan.plan import Recompute
from autoplan.sharding import REPLICATE, CollectiveKind, Placement, local_shape
from autoplan.solver.build import Model
from autoplan.solver.choice import Resolved, base_storages, saved_storages
from autoplan.solver.context import Context
from autoplan.solver.problem import Storage, ValueProblem, local_bytes

TensorSources = Mapping[str, Placement]
"""Value of the first segment of a class to how the tensor axis makes it; whole where it is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextBytes:
    """Memory of one segment on one device, on top of what its local shapes say."""

    kept: int
    """Per microbatch, from forward to backward: keys and values of other ranks."""
    transient: int
    """While the segment runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of values on one rank of both axes."""

    values: Mapping[str, ValueProblem]
    degree: int
    sources: TensorSources
    tp: int

    def __call__(self, name: str, place: Placement) -> int:
        meta = self.values[name].meta
        local = local_shape(meta.shape, place, self.degree, 0)
        shape = local_shape(local, self.sources.get(name, REPLICATE), self.tp, 0)
        return math.prod(shape) * DTYPE_BYTES[meta.dtype]


def context_collectives(
    context: Context, kind: int, tensor_sources: TensorSources, tp: int, group: Group | None = None
) -> tuple[list[Collective], list[Collective]]:
    """What one rank issues on the context axis for one segment and one microbatch: forward, backward.

    ``group`` is the axis as the mesh lays it; without one it is that of the derivation.
    """
    resolved = context.resolved[kind]
    size = _sizes(context, kind, tensor_sources, tp)
    forward: list[Collective] = []
    backward: list[Collective] = []
    for name, src, dst in resolved.moves:
        move = resolved.move((name, src, dst))
        for issued, collective, before in ((forward, move.forward, src), (backward, move.backward, dst)):
            if collective is not None:
                exchanged = collective.kind is CollectiveKind.ALL_TO_ALL
                num_bytes = size(name, before if exchanged else REPLICATE)
                issued.append(replace(collective, num_bytes=num_bytes, group=group or collective.group))
    return forward, backward


def context_bytes(
    context: Context, kind: int, tensor_sources: TensorSources, tp: int, ways: Iterable[Recompute]
) -> tuple[ContextBytes, ...]:
    """Memory that the moves of a segment need, by way to recompute: copies kept, and at work in its largest op."""
    resolved = context.resolved[kind]
    size = _sizes(context, kind, tensor_sources, tp)
    everything, working = _kept_extra(resolved, size), _working_extra(resolved, size)
    found = (_kept_again(resolved, size, everything, recompute) for recompute in ways)
    return tuple(ContextBytes(kept=kept, transient=working + max(0, everything - kept)) for kept in found)


def _kept_again(resolved: Resolved, size: _Sizes, everything: int, recompute: Recompute) -> int:
    match recompute:
        case "none" | "gather":
            return everything
        case "selective":
            return sum(size(name, dst) for name, src, dst in resolved.moves if resolved.move((name, src, dst)).forward)
        case "full":
            return 0
        case _:
            assert_never(recompute)


def prelude_bytes(model: Model, context: Context) -> int:
    """Bytes of what the segments read from the prelude, per microbatch on one rank of the context axis.

    A value that every segment reads as the same part (a mask for its own queries) is kept as that part.
    ``model`` is the one that the context was made for.
    """
    sg, metas = model.sg, model.graph.metas
    read: dict[str, set[Placement]] = {name: set() for node in sg.prelude for name in model.nodes[node].results}
    for segment in sg.segments:
        wanted = _wanted(context.resolved[segment.kind])
        for name, first in zip(segment.inputs, sg.representative(segment.kind).inputs, strict=True):
            if name in read:
                read[name] |= wanted[first]
    return sum(
        local_bytes(metas[name], next(iter(places)) if len(places) == 1 else REPLICATE, context.degree)
        for name, places in read.items()
        if places
    )


def _wanted(resolved: Resolved) -> Mapping[str, set[Placement]]:
    """Every placement in which a value is read."""
    found: dict[str, set[Placement]] = defaultdict(set)
    for node, candidate in resolved.nodes:
        for name, place in zip(node.operands, candidate.strategy.inputs, strict=True):
            found[name].add(place)
    return found


def _sizes(context: Context, kind: int, tensor_sources: TensorSources, tp: int) -> _Sizes:
    values = {value.name: value for value in context.resolved[kind].problem.values}
    return _Sizes(values=values, degree=context.degree, sources=tensor_sources, tp=tp)


def _kept_extra(resolved: Resolved, size: _Sizes) -> int:
    """What backward keeps, less what it would keep if every op read values as they are made."""
    saved = saved_storages(resolved)
    kept = {pair for pair in base_storages(resolved, saved) if _counts(size.values[pair[0]])}
    return max(0, _total(kept, size) - _total(_as_made(resolved, saved, size), size))


def _total(storages: Iterable[Storage], size: _Sizes) -> int:
    return sum(size(name, place) for name, place in storages)


def _counts(value: ValueProblem) -> bool:
    return value.origin in ("node", "input")


def _as_made(resolved: Resolved, saved: Iterable[Storage], size: _Sizes) -> set[Storage]:
    base_of = {result: node.operands[0] for node, _ in resolved.nodes if node.is_view for result in node.results}
    found: set[Storage] = set()
    for name, _ in saved:
        base = name
        while base in base_of:
            base = base_of[base]
        if _counts(size.values[base]):
            found.add((base, resolved.sources[base]))
    return found


def _working_extra(resolved: Resolved, size: _Sizes) -> int:
    """Most bytes by which the moved operands of one op exceed what they are as made."""
    most = 0
    for node, candidate in resolved.nodes:
        if not node.is_view:
            read = dict.fromkeys(zip(node.operands, candidate.strategy.inputs, strict=True))
            moved = [(name, place) for name, place in read if _counts(size.values[name])]
            most = max(most, sum(size(name, place) - size(name, resolved.sources[name]) for name, place in moved))
    return most
