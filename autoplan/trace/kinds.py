"""Names for classes of segments, for people."""

from collections.abc import Sequence

from autoplan.ir import Graph, Segment


def kind_names(segments: Sequence[Segment], graph: Graph) -> tuple[str, ...]:
    """One unique name per class: ``block`` for what repeats, ``embed`` and ``head`` for the ends, else its module."""
    count: dict[int, int] = {}
    for segment in segments:
        count[segment.kind] = count.get(segment.kind, 0) + 1
    repeated = [kind for kind in count if count[kind] > 1]
    names: list[str] = []
    for kind in range(len(count)):
        first = next(segment for segment in segments if segment.kind == kind)
        if kind in repeated:
            wanted = "block" if len(repeated) == 1 else _module_name(first, graph) or "block"
        elif first is segments[0] and len(segments) > 1:
            wanted = "embed"
        elif first is segments[-1] and len(segments) > 1:
            wanted = "head"
        else:
            wanted = _module_name(first, graph) or "part"
        names.append(_unique(wanted, names))
    return tuple(names)


def _module_name(segment: Segment, graph: Graph) -> str:
    """Deepest module that holds every node with a module path, up to the first number: ``encoder.block``."""
    paths = [graph.node_of[name].module_path.split(".") for name in _values(segment, graph)]
    paths = [path for path in paths if path != [""]]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    number = next((i for i, part in enumerate(common) if part.isdecimal()), len(common))
    return ".".join(common[:number])


def _values(segment: Segment, graph: Graph) -> list[str]:
    names = set(segment.nodes)
    return [node.results[0] for node in graph.nodes if node.name in names]


def _unique(wanted: str, taken: Sequence[str]) -> str:
    candidate, number = wanted, 1
    while candidate in taken:
        number += 1
        candidate = f"{wanted}_{number}"
    return candidate
