"""A text that is equal for two stretches of a graph exactly when one can stand for the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoplan.ir import Arg, OpNode, Ref, TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the graph around a stretch says about the values that it reads and makes."""

    metas: Mapping[str, TensorMeta]
    reached: frozenset[str]
    """Values that a parameter reaches."""
    trainable: Mapping[str, bool]
    last_read: Mapping[str, int]
    texts: dict[TensorMeta, str] = field(default_factory=dict, repr=False)
    """Texts of shapes: a model has few, and each many times."""

    def text(self, meta: TensorMeta) -> str:
        """Shape and dtype as text."""
        if meta not in self.texts:
            self.texts[meta] = str(meta)
        return self.texts[meta]


def signature(nodes: Sequence[OpNode], end: int, around: Surroundings) -> str:
    """Ops, arguments, shapes and wiring of a stretch that ends before position ``end``, with all names relative.

    A value from inside is its position; a value from outside is the order of its first use, its kind and its meta.
    """
    labels: dict[str, str] = {}
    lines = []
    for i, node in enumerate(nodes):
        results = node.results
        args = _text(node.args, labels, around)
        kwargs = [(key, _text(arg, labels, around)) for key, arg in node.kwargs] if node.kwargs else ""
        leaves = [around.last_read.get(name, -1) >= end for name in results]
        lines.append(f"{node.op}{args}{kwargs}{[*map(around.text, node.outputs)]}{leaves}")
        for k, name in enumerate(results):
            labels[name] = f"%{i}.{k}"
    return "\n".join(lines)


def _text(arg: Arg, labels: dict[str, str], around: Surroundings) -> str:
    match arg:
        case Ref():
            if arg.name not in labels:
                labels[arg.name] = _outside(arg.name, len(labels), around)
            return labels[arg.name]
        case tuple():
            return f"({', '.join([_text(item, labels, around) for item in arg])})"
        case _:
            return repr(arg)


def _outside(name: str, order: int, around: Surroundings) -> str:
    meta = around.text(around.metas[name])
    if name.startswith("param:"):
        return f"${order} param {meta} {around.trainable[name]}"
    return f"${order} {'main' if name in around.reached else 'free'} {meta}"
