"""Run an ``ir.Graph`` op by op, as a reference for tests."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from autoplan.ir import Arg, Ref, Token
from autoplan.trace.capture import Traced, flatten_inputs, unflatten_outputs


def resolve_op(name: str) -> object:
    found: object = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def to_torch(arg: Arg, env: Mapping[str, Tensor]) -> object:
    match arg:
        case Ref(name):
            return env[name]
        case Token("device", text):
            return torch.device(text)
        case Token(_, text):
            return getattr(torch, text)
        case tuple():
            return [to_torch(item, env) for item in arg]
        case _:
            return arg


def run_graph(traced: Traced, model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    graph = traced.graph
    env: dict[str, Tensor] = {f"param:{n}": p for n, p in model.named_parameters()}
    env |= {f"buffer:{n}": b for n, b in model.named_buffers()}
    env |= traced.constants
    env |= dict(zip((i.value for i in graph.inputs), flatten_inputs(traced, args, kwargs), strict=True))
    for node in graph.nodes:
        kwargs_ = {key: to_torch(arg, env) for key, arg in node.kwargs}
        result = resolve_op(node.op)(*(to_torch(a, env) for a in node.args), **kwargs_)
        results = [result] if isinstance(result, Tensor) else list(result)
        for name, meta, value in zip(node.results, node.outputs, results, strict=True):
            assert tuple(value.shape) == meta.shape, node
            assert str(value.dtype) == f"torch.{meta.dtype}", node
            env[name] = value
    leaves = [env[o.name] if isinstance(o, Ref) else o for o in graph.outputs]
    return unflatten_outputs(traced, leaves)
