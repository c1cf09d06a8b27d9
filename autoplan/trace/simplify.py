"""Nodes -> fewer nodes that compute the same: used outputs only, equal parameter-free ops once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autoplan.ir import Arg, OpNode, Ref, refs_in
from autoplan.trace.compat import is_random


@dataclass(frozen=True, slots=True, kw_only=True)
class Simplified:
    """Nodes and outputs after simplification."""

    nodes: tuple[OpNode, ...]
    outputs: tuple[Arg, ...]


def simplify(nodes: Iterable[OpNode], outputs: tuple[Arg, ...]) -> Simplified:
    """Merge equal parameter-free nodes, drop detach where no gradient flows, then drop what nothing reads."""
    table: dict[str, Arg] = {}
    kept = _merge_equal(list(nodes), table)
    merged = tuple(substitute(arg, table) for arg in outputs)
    return Simplified(nodes=_used(kept, merged), outputs=merged)


def reached_by_params(nodes: Iterable[OpNode]) -> set[str]:
    """Values that depend on a parameter."""
    reached: set[str] = set()
    for node in nodes:
        if any(name in reached or name.startswith("param:") for name in node.operands):
            reached.update(node.results)
    return reached


def substitute(arg: Arg, table: Mapping[str, Arg]) -> Arg:
    """Replace values by others."""
    if isinstance(arg, Ref):
        return table.get(arg.name, arg)
    if isinstance(arg, tuple):
        return tuple(substitute(item, table) for item in arg)
    return arg


def _merge_equal(nodes: list[OpNode], table: dict[str, Arg]) -> list[OpNode]:
    """One pass in order, so operands are already merged when a node is compared. Random ops are never merged."""
    reached = reached_by_params(nodes)
    seen: dict[str, OpNode] = {}
    kept = []
    for original in nodes:
        node = replace(
            original,
            args=tuple(substitute(arg, table) for arg in original.args),
            kwargs=tuple((key, substitute(arg, table)) for key, arg in original.kwargs),
        )
        free = not reached.intersection(node.results)
        if free and node.op == "aten.detach.default":
            table[node.name] = node.args[0]
            continue
        key = repr((node.op, node.args, node.kwargs)) if free and not is_random(node.op) else node.name
        first = seen.setdefault(key, node)
        if first is node:
            kept.append(node)
        else:
            table.update({mine: Ref(theirs) for mine, theirs in zip(node.results, first.results, strict=True)})
    return kept


def _used(nodes: list[OpNode], outputs: tuple[Arg, ...]) -> tuple[OpNode, ...]:
    needed = set(refs_in(outputs))
    kept = []
    for node in reversed(nodes):
        if needed.intersection(node.results):
            needed.update(node.operands)
            kept.append(node)
    return tuple(reversed(kept))
