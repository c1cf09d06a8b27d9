"""Graph -> ``SegmentedGraph``: a prelude and a chain of segments, equal ones in one class.

Cuts are tried in two ways. At a *narrow* cut exactly one floating value made before is read after (the outputs of
the model count as read at the end), so atoms between narrow cuts are the finest chain there is. Where values skip
over many layers (an encoder's output, router logits) there is no narrow cut; then cuts follow the module tree: one
wherever the numbered module (``layers.3``) changes. The longest repetition among the atoms becomes the blocks,
what lies before and after is searched in the same way, and atoms that do not repeat are one segment per side.
Without any repetition segments are narrow cuts where the user's top-level module changes.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoplan.ir import Graph, OpNode, Segment, SegmentedGraph, refs_in
from autoplan.trace.kinds import kind_names
from autoplan.trace.repeats import Repeat, find_repeat
from autoplan.trace.signature import Surroundings, signature
from autoplan.trace.simplify import reached_by_params

log = logging.getLogger(__name__)

Range = tuple[int, int]
"""Positions [start, end) among the main nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Main:
    """The nodes that a parameter reaches, in order, and where each value is read last."""

    graph: Graph
    nodes: tuple[OpNode, ...]
    last_read: dict[str, int]
    """Value to the position of its last reader; ``len(nodes)`` for an output of the model."""
    surroundings: Surroundings


def segment_graph(graph: Graph) -> SegmentedGraph:
    """Cut a graph into prelude and segments. Every node that a parameter reaches is in exactly one segment."""
    started = time.perf_counter()
    reached = reached_by_params(graph.nodes)
    prelude = tuple(node.name for node in graph.nodes if not reached.intersection(node.results))
    main = _main_nodes(graph, reached)
    ranges = _best_ranges(main)
    segments = _segments(main, ranges)
    names = kind_names(segments, graph)
    log.info(
        "cut %d nodes into %d segments of %d kinds in %.2f s",
        len(main.nodes), len(segments), len(names), time.perf_counter() - started,
    )  # fmt: skip
    return SegmentedGraph(graph=graph, prelude=prelude, segments=segments, kind_names=names)


def _main_nodes(graph: Graph, reached: set[str]) -> Main:
    nodes = tuple(node for node in graph.nodes if reached.intersection(node.results))
    last_read = {name: i for i, node in enumerate(nodes) for name in node.operands}
    last_read |= dict.fromkeys(refs_in(graph.outputs), len(nodes))
    trainable = {param.value: param.trainable for param in graph.params}
    surroundings = Surroundings(metas=graph.metas, reached=frozenset(reached), trainable=trainable, last_read=last_read)
    return Main(graph=graph, nodes=nodes, last_read=last_read, surroundings=surroundings)


def _best_ranges(main: Main) -> list[Range]:
    """Ranges with the repetition that covers most nodes; narrow cuts when both ways cover as much."""
    narrow = _ranges(len(main.nodes), _narrow_cuts(main))
    by_module = _ranges(len(main.nodes), _module_cuts(main.nodes, _numbered_module))
    found = [_merge_atoms(main, atoms) for atoms in (narrow, by_module)]
    best = max(found, key=lambda item: item[0])
    return best[1] if best[0] > 0 else _module_ranges(main, narrow)


def _ranges(end: int, cuts: Sequence[int]) -> list[Range]:
    bounds = [0, *(cut for cut in cuts if 0 < cut < end), end]
    return [(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]


def _narrow_cuts(main: Main) -> list[int]:
    """Positions (before that node) where one floating value is alive."""
    alive: set[str] = set()
    cuts = []
    for i, node in enumerate(main.nodes):
        alive.update(node.results)
        alive = {name for name in alive if main.last_read.get(name, -1) > i}
        if len(alive) == 1 and all(main.graph.metas[name].is_float for name in alive):
            cuts.append(i + 1)
    return cuts


def _module_cuts(nodes: Sequence[OpNode], key: Callable[[str], str]) -> list[int]:
    return [i for i in range(1, len(nodes)) if key(nodes[i].module_path) != key(nodes[i - 1].module_path)]


def _numbered_module(path: str) -> str:
    """``encoder.layers.3.attn`` -> ``encoder.layers.3``; "" outside numbered modules."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return "" if number is None else ".".join(parts[: number + 1])


def _merge_atoms(main: Main, atoms: list[Range]) -> tuple[int, list[Range]]:
    """Join atoms into segments around repetitions; also the number of nodes that the repetitions cover."""
    ids: dict[str, int] = {}
    labels = [ids.setdefault(_signature(main, atom), len(ids)) for atom in atoms]
    covered = 0
    ranges: list[Range] = []
    waiting: list[Range] = [(0, len(atoms))]
    while waiting:
        first, last = waiting.pop()
        repeat = _find(main, atoms, labels, (first, last))
        if repeat is None:
            ranges.append((atoms[first][0], atoms[last - 1][1]))
            continue
        start, end = first + repeat.start, first + repeat.start + repeat.period * repeat.count
        units = range(start, end, repeat.period)
        ranges += [(atoms[unit][0], atoms[unit + repeat.period - 1][1]) for unit in units]
        covered += atoms[end - 1][1] - atoms[start][0]
        waiting += [(a, b) for a, b in ((first, start), (end, last)) if a < b]
    return covered, sorted(ranges)


def _find(main: Main, atoms: list[Range], labels: list[int], window: Range) -> Repeat | None:
    """Best repetition among the atoms of a window whose unit has a parameter."""
    first, last = window
    inside = atoms[first:last]
    return find_repeat(
        labels[first:last],
        weights=[end - start for start, end in inside],
        useful=[any(name.startswith("param:") for n in main.nodes[a:b] for name in n.operands) for a, b in inside],
        paths=[(main.nodes[start].module_path, main.nodes[end - 1].module_path) for start, end in inside],
    )


def _module_ranges(main: Main, narrow: list[Range]) -> list[Range]:
    """Narrow cuts where the top-level module changes; a range without parameters joins the one before it."""
    depth = _common_depth([node.module_path for node in main.nodes])
    ranges: list[Range] = []
    before = ""
    for start, end in narrow:
        module = _top_level(main.nodes[start].module_path, depth)
        has_param = any(name.startswith("param:") for node in main.nodes[start:end] for name in node.operands)
        if ranges and (module in ("", before) or not has_param):
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((start, end))
        before = module or before
    return ranges


def _common_depth(paths: Sequence[str]) -> int:
    """Number of leading path parts that all non-empty paths share."""
    split = [path.split(".") for path in paths if path]
    depth = 0
    while split and all(len(parts) > depth + 1 and parts[depth] == split[0][depth] for parts in split):
        depth += 1
    return depth


def _top_level(path: str, depth: int) -> str:
    """Child below the common prefix, with its number when it is a list: ``encoder``, ``layers.3``."""
    parts = path.split(".")[depth:]
    return ".".join(parts[:2] if len(parts) > 1 and parts[1].isdecimal() else parts[:1])


def _signature(main: Main, where: Range) -> str:
    return signature(main.nodes[where[0] : where[1]], where[1], main.surroundings)


def _segments(main: Main, ranges: list[Range]) -> tuple[Segment, ...]:
    kinds: dict[str, int] = {}
    return tuple(_segment(main, where, kinds.setdefault(_signature(main, where), len(kinds))) for where in ranges)


def _segment(main: Main, where: Range, kind: int) -> Segment:
    nodes = main.nodes[where[0] : where[1]]
    made = {name for node in nodes for name in node.results}
    read = list(dict.fromkeys(name for node in nodes for name in node.operands if name not in made))
    return Segment(
        kind=kind,
        nodes=tuple(node.name for node in nodes),
        params=tuple(name for name in read if name.startswith("param:")),
        inputs=tuple(name for name in read if not name.startswith("param:")),
        outputs=tuple(n for node in nodes for n in node.results if main.last_read.get(n, -1) >= where[1]),
    )
