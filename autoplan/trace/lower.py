"""FX graph -> ``ir.OpNode``s.

In: an exported program whose ops write to nothing. Out: nodes with torch's arguments as plain data. Assertions
and ops that change nothing (``to`` the same dtype, dropout with probability 0) disappear; regions that
torch.export wraps in a higher-order op are inlined. Names are positions until ``simplify`` gives the final ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, fx

from autoplan.errors import TraceError
from autoplan.ir import Arg, OpNode, Ref, TensorMeta, Token
from autoplan.trace.blame import line_of_op
from autoplan.trace.compat import INLINED_WRAPPERS, op_name, wrapper_name
from autoplan.trace.names import tensor_meta

_ASSERTIONS = (
    "aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten._assert_async.default",
    "aten._assert_scalar.default", "aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default",
)  # fmt: skip
_ALIASES = ("aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.detach_.default")
_CASTS = ("aten.to.", "aten._to_copy.", "aten.type_as.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Nodes of one layer that are lowered as those of another."""

    old: str
    new: str
    """Paths of the two."""
    mark: str
    call: str
    """Where the one was called, and where the other is: stacks as text, outermost line first."""

    def path(self, path: str) -> str:
        """Module path in the other layer."""
        return self.new + path.removeprefix(self.old)

    def stack(self, stack: str) -> str:
        """The stack with what it shares with the one call replaced by the other."""
        lines, mark = stack.splitlines(), self.mark.splitlines()
        shared = next(
            (i for i, (a, b) in enumerate(zip(lines, mark, strict=False)) if a != b), min(len(lines), len(mark))
        )
        return "\n".join([*self.call.splitlines(), *lines[shared:]])


class Stand(Protocol):
    """Lowers ops that stand for something else."""

    def lower(self, state: "Lowered", node: fx.Node) -> bool:
        """Lower a node if it is such an op; tell whether it was."""
        ...


@dataclass(slots=True, kw_only=True)
class Lowered:
    """Nodes made so far, and what each FX node has become: a value, or a tuple of values."""

    wrapper_prefix: str
    """Name of the user's module inside the module that was exported."""
    stand: Stand | None = None
    env: dict[fx.Node, Arg] = field(default_factory=dict)
    nodes: list[OpNode] = field(default_factory=list)
    regions: dict[fx.Node, fx.GraphModule] = field(default_factory=dict)
    moved: list[Moved] = field(default_factory=list)
    """Moves that hold for the nodes being lowered, the outermost first."""
    lines: dict[tuple[object, ...], str] = field(default_factory=dict)
    """User's lines found so far, by stack."""


def lower(
    module: fx.GraphModule, placeholders: Mapping[str, Arg], wrapper_prefix: str, stand: Stand | None = None
) -> tuple[list[OpNode], Arg]:
    """Turn a graph into nodes and its outputs; ``placeholders`` gives the value of every placeholder by name."""
    state = Lowered(wrapper_prefix=wrapper_prefix, stand=stand)
    outputs = _lower_graph(state, module, [placeholders[n.name] for n in module.graph.nodes if n.op == "placeholder"])
    return state.nodes, outputs


def _lower_graph(state: Lowered, module: fx.GraphModule, arguments: list[Arg]) -> Arg:
    incoming = iter(arguments)
    for node in module.graph.nodes:
        match node.op:
            case "placeholder":
                state.env[node] = next(incoming)
            case "output":
                return convert(state, node.args[0])
            case _:
                lower_node(state, node)
    raise AssertionError("an FX graph ends in an output node")


def lower_node(state: Lowered, node: fx.Node) -> None:
    """Lower one node that is neither a placeholder nor the output."""
    match node.op:
        case "get_attr":
            module = node.graph.owning_module
            assert module is not None
            state.regions[node] = module.get_submodule(str(node.target))  # type: ignore[assignment]
        case "call_function":
            if state.stand is None or not state.stand.lower(state, node):
                _lower_call(state, node)
        case _:
            raise TraceError(f"the exported graph has a {node.op} node ({node.name}), which has no meaning here")


def _lower_call(state: Lowered, node: fx.Node) -> None:
    name = op_name(node.target)
    if wrapper_name(node.target) in INLINED_WRAPPERS:
        state.env[node] = _inline(state, node)
    elif name is None:
        state.env[node] = _lower_python(state, node)
    elif name in _ASSERTIONS:
        return
    elif _changes_nothing(name, node):
        state.env[node] = convert(state, node.args[0])
    elif name == "aten.broadcast_tensors.default":
        state.env[node] = _broadcast(state, node)
    elif name == "aten.copy.default":
        state.env[node] = _copy(state, node)
    elif name == "aten.native_dropout.default" and not _mask_is_used(node):
        state.env[node] = (_emit(state, node, "aten.dropout.default", node.meta["val"][0]), None)
    else:
        state.env[node] = _emit(state, node, name, node.meta.get("val"))


def _broadcast(state: Lowered, node: fx.Node) -> Arg:
    """``broadcast_tensors`` as one expand per tensor that it changes; losses call it on tensors of one shape."""
    tensors, results = node.args[0], node.meta["val"]
    assert isinstance(tensors, list | tuple)
    found: list[Arg] = []
    for tensor, result in zip(tensors, results, strict=True):
        assert isinstance(tensor, fx.Node)
        if tensor.meta["val"].shape == result.shape:
            found.append(convert(state, tensor))
        else:
            found.append(_emit(state, node, "aten.expand.default", result, (tensor, list(result.shape))))
    return tuple(found)


def _copy(state: Lowered, node: fx.Node) -> Arg:
    """``copy(x, source)``, which has no gradient in torch, as ``source`` in the shape and dtype of x."""
    source, result = node.args[1], node.meta["val"]
    assert isinstance(source, fx.Node)
    value, before = convert(state, source), source.meta["val"]
    if before.shape != result.shape:
        wide = before.expand(result.shape)
        value = _emit(state, node, "aten.expand.default", wide, (source, list(result.shape)))
    if before.dtype is result.dtype:
        return value
    return _emit(state, node, "aten.to.dtype", result, (value, result.dtype))


def _inline(state: Lowered, node: fx.Node) -> Arg:
    """Lower the wrapped region in place of the wrapper."""
    position = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg in state.regions)
    region = node.args[position]
    assert isinstance(region, fx.Node)
    arguments = [convert(state, arg) for arg in node.args[position + 1 :]]
    return _lower_graph(state, state.regions[region], arguments)


def _lower_python(state: Lowered, node: fx.Node) -> Arg:
    """Only ``getitem`` on an op with several outputs is expected; everything else computes with sizes or is a HOP."""
    source = convert(state, node.args[0]) if node.args else None
    index = node.args[1] if len(node.args) > 1 else None
    if getattr(node.target, "__name__", "") == "getitem" and isinstance(source, tuple) and isinstance(index, int):
        return source[index]
    what = wrapper_name(node.target) or getattr(node.target, "__name__", str(node.target))
    raise TraceError(
        f"{what} at {line_of_op(node.stack_trace) or node.name} cannot be planned: it is not a tensor op. "
        "Control flow (cond, scan, while_loop) and sizes that depend on the data have to be written without it."
    )


def _changes_nothing(name: str, node: fx.Node) -> bool:
    if name in _ALIASES:
        return True
    if name == "aten.dropout.default":
        return bool(node.args[1] == 0 or not node.args[2])
    source = node.args[0] if node.args else None
    if not name.startswith(_CASTS) or not isinstance(source, fx.Node):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    same_kind = before.dtype is after.dtype and bool(before.device == after.device)
    return same_kind and before.stride() == after.stride()


def _mask_is_used(dropout: fx.Node) -> bool:
    """Functionalising turns dropout into native_dropout, which also returns its mask; a forward pass ignores it."""
    return any(user.args[1] != 0 and len(user.users) > 0 for user in dropout.users)


def _emit(state: Lowered, node: fx.Node, op: str, val: object, args: tuple[object, ...] | None = None) -> Arg:
    """Add a node; ``args`` are those of the FX node where none are given."""
    module_path, source = _place(state, node)
    where = f"the result of {op} in {module_path or 'the model'} ({source or node.name})"
    made = OpNode(
        name=f"%{len(state.nodes)}",
        op=op,
        args=tuple(convert(state, arg) for arg in (node.args if args is None else args)),
        kwargs=tuple((key, convert(state, arg)) for key, arg in node.kwargs.items() if key != "pin_memory"),
        outputs=_metas(val, where),
        module_path=module_path,
        source=source,
    )
    state.nodes.append(made)
    if isinstance(val, Tensor):
        return Ref(made.name)
    return tuple(Ref(name) for name in made.results)


def _metas(val: object, where: str) -> tuple[TensorMeta, ...]:
    values = list(val) if isinstance(val, (tuple, list)) else [val]
    metas = []
    for value in values:
        if not isinstance(value, Tensor):
            raise TraceError(
                f"{where} is {value!r}, not a tensor. A number taken out of a tensor (.item(), int(x), len(nonzero)) "
                "makes the graph depend on the data; compute it with tensors instead."
            )
        metas.append(tensor_meta(value, where))
    return tuple(metas)


def _place(state: Lowered, node: fx.Node) -> tuple[str, str]:
    """Module path and user's line of a node, as the layer that it is lowered for."""
    path, stack = _module_path(node, state.wrapper_prefix), node.stack_trace or ""
    for moved in reversed(state.moved):
        path = moved.path(path)
    key = stack, *((moved.mark, moved.call) for moved in state.moved)
    if key not in state.lines:
        for moved in reversed(state.moved):
            stack = moved.stack(stack)
        state.lines[key] = line_of_op(stack)
    return path, state.lines[key]


def _module_path(node: fx.Node, prefix: str) -> str:
    """Innermost module: nn_module_stack is outermost first; the second call of a module is marked ``@1``."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]).split("@")[0] if stack else ""
    return path.removeprefix(prefix).removeprefix(".")


def convert(state: Lowered, arg: object) -> Arg:
    """Turn an argument of an FX node into plain data."""
    match arg:
        case fx.Node():
            if arg not in state.env:
                raise TraceError(f"{arg.name} is used as a value, but it is not one: {arg.format_node()}")
            return state.env[arg]
        case Ref():
            return arg
        case None | bool() | int() | float() | str():
            return arg
        case tuple() | list():
            return tuple(convert(state, item) for item in arg)
        case _:
            return _token(arg)


def _token(arg: object) -> Token:
    match arg:
        case torch.dtype():
            return Token("dtype", str(arg).removeprefix("torch."))
        case torch.device():
            return Token("device", str(arg))
        case torch.layout():
            return Token("layout", str(arg).removeprefix("torch."))
        case torch.memory_format():
            return Token("memory_format", str(arg).removeprefix("torch."))
        case _:
            raise TraceError(f"an op takes {arg!r} ({type(arg).__name__}), which a graph cannot hold")
