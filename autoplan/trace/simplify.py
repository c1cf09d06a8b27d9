"""Nodes -> fewer nodes that compute the same: used outputs only, equal parameter-free ops once, named by their ops."""

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
    """Drop what nothing reads, merge equal parameter-free nodes, drop detach where no gradient flows; then name.

    The result depends on what is computed alone, not on names or on what was traced for nothing.
    """
    table: dict[str, Arg] = {}
    kept = _merge_equal(_used(list(nodes), outputs), table)
    merged = tuple(substitute(arg, table) for arg in outputs)
    return _named(_used(kept, merged), merged)


def _named(nodes: list[OpNode], outputs: tuple[Arg, ...]) -> Simplified:
    """Name every node by its op and how many of that op came before: ``linear``, ``linear_1``."""
    counts: dict[str, int] = {}
    taken: set[str] = set()
    table: dict[str, Arg] = {}
    named = []
    for node in nodes:
        new = replace(_substituted(node, table), name=_unique(node.op.split(".")[1], counts, taken))
        table.update({old: Ref(name) for old, name in zip(node.results, new.results, strict=True)})
        named.append(new)
    return Simplified(nodes=tuple(named), outputs=tuple(substitute(arg, table) for arg in outputs))


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


def _unique(base: str, counts: dict[str, int], taken: set[str]) -> str:
    while True:
        count = counts[base] = counts.get(base, -1) + 1
        name = f"{base}_{count}" if count else base
        if name not in taken:
            taken.add(name)
            return name


def _substituted(node: OpNode, table: Mapping[str, Arg]) -> OpNode:
    return replace(
        node,
        args=tuple(substitute(arg, table) for arg in node.args),
        kwargs=tuple((key, substitute(arg, table)) for key, arg in node.kwargs),
    )


def _merge_equal(nodes: list[OpNode], table: dict[str, Arg]) -> list[OpNode]:
    """One pass in order, so operands are already merged when a node is compared. Random ops are never merged."""
    reached = reached_by_params(nodes)
    seen: dict[str, OpNode] = {}
    kept = []
    for original in nodes:
        node = _substituted(original, table)
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


def _used(nodes: list[OpNode], outputs: tuple[Arg, ...]) -> list[OpNode]:
    needed = set(refs_in(outputs))
    kept = []
    for node in reversed(nodes):
        if needed.intersection(node.results):
            needed.update(node.operands)
            kept.append(node)
    return kept[::-1]
