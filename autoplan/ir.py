"""The traced model as data: no torch object inside, so it can be planned and saved anywhere.

A *value* is a tensor with a name. Names tell where it comes from:

    param:h.0.attn.c_attn.weight    a parameter, under its name in ``state_dict``
    buffer:rotary.inv_freq          a buffer
    const:0                         a tensor created while tracing (``torch.tensor(...)`` in the model)
    input:0                         the first flattened user input
    linear_3, split.1               output of an op (the number after the dot counts several outputs)

The *prelude* is every op that no parameter reaches (masks, rotary tables, shifted labels). No gradient flows
there and its inputs are known to every rank, so each pipeline stage computes what it reads by itself.
The rest is a chain of *segments*; segments with equal structure, shapes and attributes form one *class*.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Refuse what is not a tensor."""
        if any(size < 0 for size in self.shape):
            raise ValueError(f"a tensor has no negative sizes, found shape {self.shape}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is not known; known: {', '.join(DTYPE_BYTES)}")

    @property
    def num_elements(self) -> int:
        """Elements in the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense copy."""
        return self.num_elements * DTYPE_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether a gradient can flow through it."""
        return "float" in self.dtype

    def __str__(self) -> str:
        """Print as ``float32[2, 64, 128]``."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a value."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """An argument that torch has a type for: ``Token("dtype", "float32")``, also device, layout, memory_format."""

    kind: str
    text: str


Arg = Ref | Token | int | float | bool | str | None | tuple["Arg", ...]


def refs_in(arg: Arg) -> Iterator[str]:
    """Names of the values in an argument, left to right, repeats included."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs_in(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One op: ``op`` is its full name (``aten.linear.default``), arguments as torch takes them."""

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorMeta, ...]
    module_path: str = ""
    """Where in the user's module tree: ``h.0.attn``."""
    source: str = ""
    """The user's line: ``model.py:31, in forward``."""

    @property
    def operands(self) -> tuple[str, ...]:
        """Values read, in argument order, a value that is passed twice twice."""
        positional = tuple(refs_in(self.args))
        return positional + tuple(name for _, arg in self.kwargs for name in refs_in(arg))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the values it makes."""
        if len(self.outputs) == 1:
            return (self.name,)
        return tuple(f"{self.name}.{i}" for i in range(len(self.outputs)))

    @property
    def where(self) -> str:
        """For messages: the op, its module and the user's line."""
        parts = [self.op]
        if self.module_path:
            parts.append(f"in module {self.module_path}")
        if self.source:
            parts.append(f"({self.source})")
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """A parameter; ``aliases`` are further names of the same tensor (a tied head)."""

    name: str
    meta: TensorMeta
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def value(self) -> str:
        """Name of its value in the graph."""
        return f"param:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """A flattened user input; ``batch_dim`` is the dim that counts samples, None where there is none."""

    value: str
    path: str
    """Where the user passes it: ``input_ids``, ``args[0]``."""
    meta: TensorMeta
    batch_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A forward graph at the global batch size. ``outputs`` are flattened as the model returned them.

    ``constants`` holds buffers (``buffer:NAME``) and traced constants (``const:N``).
    An output that is not a tensor (None, a number) is kept as such. ``loss`` names the scalar to differentiate.
    """

    nodes: tuple[OpNode, ...]
    params: tuple[Param, ...]
    constants: tuple[tuple[str, TensorMeta], ...]
    inputs: tuple[GraphInput, ...]
    outputs: tuple[Arg, ...]
    loss: str | None
    batch_size: int
    metas: dict[str, TensorMeta] = field(init=False, repr=False, compare=False)
    node_of: dict[str, OpNode] = field(init=False, repr=False, compare=False)
    """Value name to the node that makes it."""

    def __post_init__(self) -> None:
        """Index the values once; the two indices follow from the fields above."""
        metas = {p.value: p.meta for p in self.params}
        metas |= dict(self.constants)
        metas |= {i.value: i.meta for i in self.inputs}
        node_of = {}
        for node in self.nodes:
            for name, meta in zip(node.results, node.outputs, strict=True):
                metas[name] = meta
                node_of[name] = node
        object.__setattr__(self, "metas", metas)
        object.__setattr__(self, "node_of", node_of)

    @property
    def digest(self) -> str:
        """Fingerprint of structure, shapes and names (not of weights); equal graphs have equal digests."""
        text = repr((
            [(n.name, n.op, n.args, n.kwargs, n.outputs) for n in self.nodes],
            self.params, self.constants, self.inputs, self.outputs, self.loss,
        ))  # fmt: skip
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A link of the chain. Within a class, position i of each tuple means the same thing in every segment."""

    kind: int
    """Index of its class."""
    nodes: tuple[str, ...]
    params: tuple[str, ...]
    """Values ``param:...`` that it reads, in order of first use."""
    inputs: tuple[str, ...]
    """Other values it reads from outside: earlier segments, prelude, user inputs, constants."""
    outputs: tuple[str, ...]
    """Values it makes that something outside reads (or that the model returns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedGraph:
    """A graph cut into its prelude and a chain of segments."""

    graph: Graph
    prelude: tuple[str, ...]
    """Node names, in topological order."""
    segments: tuple[Segment, ...]
    kind_names: tuple[str, ...]
    """A name for each class, for people: ``block``, ``embed``, ``head``; unique."""
    shared_params: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Values of the parameters that more than one segment reads, in order of first use."""

    def __post_init__(self) -> None:
        """Count the readers of parameters once."""
        reads = Counter(name for segment in self.segments for name in segment.params)
        object.__setattr__(self, "shared_params", tuple(name for name, count in reads.items() if count > 1))

    def representative(self, kind: int) -> Segment:
        """First segment of a class."""
        return next(s for s in self.segments if s.kind == kind)


def verify_graph(graph: Graph) -> None:
    """Raise ValueError on a duplicate name, a dangling read or a read before the write."""
    known = {p.value for p in graph.params} | {name for name, _ in graph.constants} | {i.value for i in graph.inputs}
    for node in graph.nodes:
        for name in node.operands:
            if name not in known:
                raise ValueError(f"{node.name} ({node.where}) reads {name!r}, which nothing before it makes")
        for name in node.results:
            if name in known:
                raise ValueError(f"{node.name} ({node.where}) makes {name!r} a second time")
            known.add(name)
    for name in [*refs_in(graph.outputs), *([graph.loss] if graph.loss else [])]:
        if name not in known:
            raise ValueError(f"the graph returns {name!r}, which nothing makes")
