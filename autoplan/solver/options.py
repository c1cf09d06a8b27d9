"""A resolved choice x a way to recompute -> what one segment costs: the options of level 2.

none       everything that backward needs is kept
gather     of floats that were all-gathered only the part of this rank is kept, and gathered once more in backward
selective  results of matmuls, attention and collectives are kept, the rest is computed again in backward
full       only what the segment reads from earlier segments is kept; the forward pass runs again, its
           collectives included
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from autoplan.cost import Collective
from autoplan.plan.plan import CollectiveCount, LayoutCost, Recompute
from autoplan.sharding import CollectiveKind
from autoplan.solver.choice import Resolved, activation_bytes, base_storages, kept_bytes, saved_storages
from autoplan.solver.problem import MoveKey, Storage, local_bytes


def layout_cost(resolved: Resolved, recompute: Recompute) -> LayoutCost:
    """Time, communication and memory of one segment and one microbatch on one device."""
    return layout_costs(resolved, (recompute,))[0]


def layout_costs(resolved: Resolved, ways: Iterable[Recompute]) -> tuple[LayoutCost, ...]:
    """The same for each of several ways to recompute, which share most of it."""
    forward = forward_collectives(resolved)
    forward_us, light_us = _forward_us(resolved)
    backward_us, backward_comm = _backward_us(resolved)
    whole = LayoutCost(
        forward_us=forward_us,
        backward_us=backward_us,
        weight_us=sum(candidate.weight_us for _, candidate in resolved.nodes),
        forward_comm_us=_forward_comm_us(resolved),
        backward_comm_us=backward_comm,
        activation_bytes=activation_bytes(resolved),
        transient_bytes=working_bytes(resolved),
        collectives=count_collectives("tp", [*forward, *backward_collectives(resolved)]),
    )
    return tuple(_recomputed(resolved, whole, forward, light_us, recompute) for recompute in ways)


def _recomputed(
    resolved: Resolved, whole: LayoutCost, forward: list[Collective], light_us: float, recompute: Recompute
) -> LayoutCost:
    again_us, again_comm_us, collectives = 0.0, 0.0, whole.collectives
    match recompute:
        case "none":
            pass
        case "gather":
            moves = [resolved.move(key) for key in gathered_again(resolved)]
            again_comm_us = sum(move.forward_us for move in moves)
            issued = [move.forward for move in moves if move.forward is not None]
            collectives = count_collectives("tp", [*forward, *backward_collectives(resolved), *issued])
        case "selective":
            again_us = light_us
        case "full":
            again_us, again_comm_us = whole.forward_us, whole.forward_comm_us
            collectives = count_collectives("tp", [*forward, *backward_collectives(resolved), *forward])
        case _:
            assert_never(recompute)
    kept = whole.activation_bytes if recompute == "none" else option_bytes(resolved, recompute)
    return replace(
        whole,
        backward_us=whole.backward_us + again_us,
        backward_comm_us=whole.backward_comm_us + again_comm_us,
        activation_bytes=kept,
        transient_bytes=whole.transient_bytes + max(0, whole.activation_bytes - kept),
        collectives=collectives,
    )


def option_bytes(resolved: Resolved, recompute: Recompute) -> int:
    """Activation bytes kept from forward to backward."""
    match recompute:
        case "none":
            return activation_bytes(resolved)
        case "gather":
            again = {(name, dst): (name, src) for name, src, dst in gathered_again(resolved)}
            extra = sum(c.extra_bytes for _, c in resolved.nodes)
            return extra + kept_bytes(resolved, [again.get(pair, pair) for pair in _saved(resolved)])
        case "selective":
            extra = sum(c.extra_bytes for n, c in resolved.nodes if n.is_heavy)
            return extra + kept_bytes(resolved, [*_inputs(resolved), *_heavy_results(resolved), *_gathered(resolved)])
        case "full":
            return kept_bytes(resolved, _inputs(resolved))
        case _:
            assert_never(recompute)


def _inputs(resolved: Resolved) -> list[Storage]:
    return [(v.name, resolved.sources[v.name]) for v in resolved.problem.values if v.origin == "input"]


def _heavy_results(resolved: Resolved) -> list[Storage]:
    heavy = ((n, c) for n, c in resolved.nodes if n.is_heavy)
    return [pair for n, c in heavy for pair in zip(n.results, c.strategy.outputs, strict=True)]


def _gathered(resolved: Resolved) -> list[Storage]:
    return [(name, dst) for name, src, dst in resolved.moves if resolved.move((name, src, dst)).forward]


def gathered_again(resolved: Resolved) -> tuple[MoveKey, ...]:
    """Moves of floats by an all-gather whose results backward needs: their sources are enough."""
    saved, floats = _saved(resolved), {v.name for v in resolved.problem.values if v.meta.is_float}
    return tuple(
        key
        for key in resolved.moves
        if key[0] in floats
        and (key[0], key[2]) in saved
        and _kind(resolved.move(key).forward) is CollectiveKind.ALL_GATHER
    )


def _saved(resolved: Resolved) -> set[Storage]:
    return base_storages(resolved, saved_storages(resolved))


def _kind(collective: Collective | None) -> CollectiveKind | None:
    return None if collective is None else collective.kind


def forward_collectives(resolved: Resolved) -> list[Collective]:
    """What one rank issues in the forward pass."""
    moved = [resolved.move(key).forward for key in resolved.moves]
    inside = [collective for _, candidate in resolved.nodes for collective in candidate.internal]
    return [collective for collective in moved if collective is not None] + inside


def backward_collectives(resolved: Resolved) -> list[Collective]:
    """What one rank issues in the backward pass, recomputation apart."""
    moved = [resolved.move(key).backward for key in resolved.moves]
    inside = [collective for _, candidate in resolved.nodes for collective in candidate.internal_backward]
    return [collective for collective in moved if collective is not None] + inside


def largest_buffer_bytes(resolved: Resolved) -> int:
    """Bytes of the largest collective of the segment."""
    issued = [*forward_collectives(resolved), *backward_collectives(resolved)]
    return max((collective.num_bytes for collective in issued), default=0)


def count_collectives(axis: str, issued: Iterable[Collective], times: int = 1) -> tuple[CollectiveCount, ...]:
    """Collectives by kind, each issued ``times`` times."""
    found: dict[str, tuple[int, int]] = {}
    kinds = {collective.kind.value: collective.kind for collective in issued}
    for collective in issued:
        count, num_bytes = found.get(collective.kind.value, (0, 0))
        found[collective.kind.value] = (count + times, num_bytes + times * collective.num_bytes)
    return tuple(
        CollectiveCount(axis=axis, kind=kinds[name], count=count, num_bytes=num_bytes)
        for name, (count, num_bytes) in sorted(found.items())
    )


def _forward_us(resolved: Resolved) -> tuple[float, float]:
    """Compute of the forward pass; and the part of it that selective recomputation repeats."""
    local = sum(m.forward_us for m in map(resolved.move, resolved.moves) if m.forward is None)
    light = sum(c.forward_us for n, c in resolved.nodes if not n.is_heavy)
    heavy = sum(c.forward_us for n, c in resolved.nodes if n.is_heavy)
    return local + light + heavy, local + light


def _forward_comm_us(resolved: Resolved) -> float:
    moved = sum(m.forward_us for m in map(resolved.move, resolved.moves) if m.forward is not None)
    return moved + sum(candidate.internal_us for _, candidate in resolved.nodes)


def _backward_us(resolved: Resolved) -> tuple[float, float]:
    moves = [resolved.move(key) for key in resolved.moves]
    local = sum(m.backward_us for m in moves if m.backward is None)
    comm = sum(m.backward_us for m in moves if m.backward is not None)
    comm += sum(candidate.internal_backward_us for _, candidate in resolved.nodes)
    return local + sum(candidate.backward_us for _, candidate in resolved.nodes), comm


def working_bytes(resolved: Resolved) -> int:
    """Most bytes that one op touches: its operands and results, parameters apart, or equally their gradients."""
    values = {v.name: v for v in resolved.problem.values}
    most = 0
    for node, candidate in resolved.nodes:
        if not node.is_view:
            touched = [
                *zip(node.operands, candidate.strategy.inputs, strict=True),
                *zip(node.results, candidate.strategy.outputs, strict=True),
            ]
            sizes = (
                local_bytes(values[name].meta, place, resolved.problem.degree)
                for name, place in dict.fromkeys(touched)
                if values[name].origin != "param"
            )
            most = max(most, sum(sizes))
    return most
