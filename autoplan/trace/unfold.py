"""The ops that stand for a layer -> the nodes of the layer, while a folded graph is lowered.

A marked region is lowered again for each call that stands for it: its inputs are those of the call, its parameters
and buffers those of the other layer, and its lines of code go through the place where that layer was called. The
second region of each unit is compared, node for node, with the first one lowered in its place; a difference raises
CannotFold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autoplan.ir import Arg
from autoplan.trace.compat import op_name
from autoplan.trace.fold import MARK_IN, MARK_OUT, REPLAY, CannotFold, Fold
from autoplan.trace.lower import Lowered, Moved, convert, lower_node

_OPS = (MARK_IN, MARK_OUT, REPLAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The nodes of a layer between its marks, and the marks by number."""

    path: str
    inputs: dict[int, fx.Node]
    nodes: tuple[fx.Node, ...]
    outputs: dict[int, fx.Node]


@dataclass(slots=True, kw_only=True)
class Unfold:
    """Lowers marks and the ops that stand for calls."""

    fold: Fold
    regions: dict[int, Region]
    tensors: Mapping[str, fx.Node]
    """Placeholder of each parameter and buffer that the graph has, by its name in the user's module."""
    values: dict[str, Arg]
    """Value of every parameter and buffer, by the same name."""
    starts: dict[int, int] = field(default_factory=dict)
    """Number of nodes before a region, as it was lowered itself."""
    results: dict[int, dict[int, Arg]] = field(default_factory=dict)
    """Results of the calls lowered so far."""

    def lower(self, state: Lowered, node: fx.Node) -> bool:
        """Lower a node if it is one of those ops; tell whether it was."""
        name = op_name(node.target)
        if name not in _OPS:
            return False
        given, number, index = node.args[:3]
        assert isinstance(number, int) and isinstance(index, int)
        if name == REPLAY:
            state.env[node] = self._replay(state, node, number, index)
            return True
        if name == MARK_IN:
            self.starts[number] = len(state.nodes)
        elif not state.moved:
            self._compare(state, number)
        state.env[node] = convert(state, given)
        return True

    def _replay(self, state: Lowered, node: fx.Node, call: int, index: int) -> Arg:
        if call not in self.results:
            replay = self.fold.replays[call]
            given = node.args[0]
            assert isinstance(given, list | tuple)
            arguments = [convert(state, item) for item in given]
            self.results[call] = self._repeat(state, replay.region, replay.path, arguments, node.stack_trace or "")
        if index not in self.results[call]:
            raise CannotFold("a value is read of a later layer that is not read of the first one")
        return self.results[call][index]

    def _repeat(self, state: Lowered, number: int, path: str, given: list[Arg], stack: str) -> dict[int, Arg]:
        """Lower a region as the layer at ``path``; its results by number."""
        region = self.regions[number]
        bound: dict[fx.Node, Arg] = {node: given[i] for i, node in region.inputs.items()}
        values = {
            name: self.values[path + name.removeprefix(region.path)]
            for name in self.values if name.startswith(f"{region.path}.")
        }  # fmt: skip
        bound |= {self.tensors[name]: value for name, value in values.items() if name in self.tensors}
        before = {node: state.env[node] for node in (*bound, *region.nodes) if node in state.env}
        results, self.results = self.results, {}
        outer, self.values = self.values, {**self.values, **values}
        mark = next(iter(region.inputs.values()))
        state.env.update(bound)
        state.moved.append(Moved(old=region.path, new=path, mark=mark.stack_trace or "", call=stack))
        for node in region.nodes:
            lower_node(state, node)
        made = {i: convert(state, node.args[0]) for i, node in region.outputs.items()}
        state.moved.pop()
        self.results, self.values = results, outer
        state.env.update(before)
        return made

    def _compare(self, state: Lowered, number: int) -> None:
        """At the end of a second region, lower the first one in its place: the nodes must be the same."""
        firsts = [first for first, second in self.fold.twins if second == number]
        if not firsts or number not in self.starts:
            return
        start, region = self.starts.pop(number), self.regions[number]
        nodes, state.nodes = state.nodes, state.nodes[:start]
        inputs = region.inputs
        given = [state.env[inputs[i]] if i in inputs else None for i in range(max(inputs) + 1)]
        stack = next(iter(inputs.values())).stack_trace or ""
        made = self._repeat(state, firsts[0], region.path, given, stack)
        again, state.nodes = state.nodes, nodes
        wanted = {i: convert(state, node.args[0]) for i, node in region.outputs.items()}
        if again != nodes or any(made.get(i) != value for i, value in wanted.items()):
            raise CannotFold(f"{region.path} computes something else than {self.regions[firsts[0]].path}")


def find_regions(graph: fx.Graph, fold: Fold, tensors: Mapping[str, fx.Node]) -> dict[int, Region]:
    """The regions between marks. CannotFold where one that calls stand for, or its twin, is not closed."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    order = list(position)
    marks: dict[tuple[str, int], dict[int, fx.Node]] = {}
    for node in order:
        name = op_name(node.target) if node.op == "call_function" else None
        if name in (MARK_IN, MARK_OUT):
            marks.setdefault((str(name), node.args[1]), {})[node.args[2]] = node
    found = {}
    needed = {number for pair in fold.twins for number in pair}
    for number, path in enumerate(fold.regions):
        inputs, outputs = marks.get((MARK_IN, number), {}), marks.get((MARK_OUT, number), {})
        if number in needed and not (inputs and outputs):
            raise CannotFold(f"nothing is read of what {path} makes, or it reads nothing")
        if not inputs or not outputs:
            continue
        start, end = max(map(position.__getitem__, inputs.values())), min(map(position.__getitem__, outputs.values()))
        region = Region(path=fold.regions[number], inputs=inputs, nodes=tuple(order[start + 1 : end]), outputs=outputs)
        if number in needed:
            _check_closed(region, tensors)
        found[number] = region
    return found


def _check_closed(region: Region, tensors: Mapping[str, fx.Node]) -> None:
    """A region reads its inputs and its layer's tensors only, and is read through its outputs only."""
    inside = {*region.nodes, *region.inputs.values()}
    own = {node for name, node in tensors.items() if name.startswith(f"{region.path}.")}
    read = {source for node in (*region.nodes, *region.outputs.values()) for source in node.all_input_nodes}
    readers = {user for node in region.nodes for user in node.users}
    stray = [node for node in read - inside - own if node.op != "get_attr"] + list(
        readers - inside - set(region.outputs.values())
    )
    if stray:
        names = ", ".join(sorted(node.name for node in stray))
        raise CannotFold(f"{region.path} shares values with the rest of the model beside its arguments: {names}")


def refuse_hidden_marks(module: fx.GraphModule) -> None:
    """Raise CannotFold for marks in a region that torch.export wrapped, where no order is left."""
    for part in module.modules():
        nodes = part.graph.nodes if part is not module and isinstance(part, fx.GraphModule) else ()
        if any(op_name(node.target) in _OPS for node in nodes):
            raise CannotFold("layers run inside no_grad or autocast")
