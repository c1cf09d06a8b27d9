"""The experts of a mixture as one op, ``torch.ops.autoplan.experts``: it runs anywhere and stays one node of a graph.

    experts(hidden (T, H), index (T, k), weights (T, k), gate_up (E, 2I, H), down (E, H, I), activation, num_experts)

gives (T, H). Token t is the sum over its k slots of ``weights * down[e] @ (act(gate) * up)``, where e is the slot's
index and gate, up are the halves of ``gate_up[e] @ hidden[t]``. A first projection of (E, I, H) has no gate:
``act(up)``. A slot whose index is outside [0, E) adds nothing, so a rank that holds a part of the experts can shift
the indices. ``num_experts`` is E before anything is split.

Which token meets which expert depends on the data, so a graph cannot hold the loop over experts. Backward keeps the
operands and the result of the first projection, T * k rows; what is cheap is computed again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from autoplan.trace.compat import below_autograd

_aten = torch.ops.aten

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (torch.nn.functional.silu, _aten.silu_backward.default),
    "gelu": (torch.nn.functional.gelu, _aten.gelu_backward.default),
    "gelu_tanh": (
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda grad, x: _aten.gelu_backward.default(grad, x, approximate="tanh"),
    ),
    "relu": (torch.relu, lambda grad, x: grad * (x > 0)),
    "relu2": (lambda x: torch.relu(x).square(), lambda grad, x: grad * 2 * torch.relu(x)),
}
"""What the op knows: the function, and the gradient of its operand from that of its result and the operand."""

_OPERANDS = "Tensor hidden, Tensor index, Tensor weights, Tensor gate_up, Tensor down"
_SCHEMAS = (
    f"experts({_OPERANDS}, str activation, int num_experts) -> Tensor",
    f"experts_forward({_OPERANDS}, str activation) -> (Tensor, Tensor)",
    f"experts_backward(Tensor grad, {_OPERANDS}, Tensor first, str activation) -> (Tensor, Tensor, Tensor, Tensor)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What one expert computes: ``slots`` of the T * k, their ``tokens``, and where they lie in the sorted order."""

    expert: int
    slots: Tensor
    tokens: Tensor
    place: slice


def _shares(index: Tensor, num_experts: int) -> Iterator[_Share]:
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    edges = torch.searchsorted(flat[order], torch.arange(num_experts + 1, device=flat.device, dtype=flat.dtype))
    bounds: list[int] = edges.tolist()
    for expert, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if start < end:
            slots = order[start:end]
            yield _Share(expert=expert, slots=slots, tokens=slots // index.shape[1], place=slice(start, end))


def _activate(first: Tensor, activation: str, size: int) -> Tensor:
    function = ACTIVATIONS[activation][0]
    return function(first[:, :size]) * first[:, size:] if first.shape[1] != size else function(first)


def _activate_backward(grad: Tensor, first: Tensor, activation: str, size: int) -> Tensor:
    function, derivative = ACTIVATIONS[activation]
    if first.shape[1] == size:
        return derivative(grad, first)
    gate, up = first[:, :size].contiguous(), first[:, size:]
    return torch.cat((derivative(grad * up, gate), grad * function(gate)), 1)


def _forward(
    hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The result, and the first projection of every slot, sorted by expert."""
    first = hidden.new_zeros(index.numel(), gate_up.shape[1])
    total = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, weights.dtype))
    scale = weights.reshape(-1, 1)
    for share in _shares(index, down.shape[0]):
        first[share.place] = hidden[share.tokens] @ gate_up[share.expert].T
        rows = _activate(first[share.place], activation, down.shape[2]) @ down[share.expert].T
        total.index_add_(0, share.tokens, rows * scale[share.slots])
    return total.to(hidden.dtype), first


def _backward(
    grad: Tensor, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, first: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    to_hidden, to_gate_up, to_down = torch.zeros_like(hidden), torch.zeros_like(gate_up), torch.zeros_like(down)
    to_weights, size = torch.zeros_like(weights).reshape(-1), down.shape[2]
    scale = weights.reshape(-1, 1)
    for share in _shares(index, down.shape[0]):
        rows, kept = grad[share.tokens], first[share.place]
        activated = _activate(kept, activation, size)
        scaled = (rows * scale[share.slots]).to(rows.dtype)
        to_down[share.expert] = scaled.T @ activated
        to_activated = rows @ down[share.expert]
        to_weights[share.slots] = (to_activated * activated).sum(1, dtype=to_weights.dtype)
        to_activated = (to_activated * scale[share.slots]).to(rows.dtype)
        to_first = _activate_backward(to_activated, kept, activation, size)
        to_gate_up[share.expert] = to_first.T @ hidden[share.tokens]
        to_hidden.index_add_(0, share.tokens, to_first @ gate_up[share.expert])
    return to_hidden, to_weights.reshape(weights.shape), to_gate_up, to_down


class _Experts(torch.autograd.Function):
    """Forward that keeps the first projection, so that backward is two products per product."""

    @staticmethod
    def forward(ctx: FunctionCtx, *args: object) -> Tensor:
        *operands, activation, _ = args
        result, first = torch.ops.autoplan.experts_forward(*operands, activation)
        ctx.save_for_backward(*operands, first)  # type: ignore[arg-type]
        ctx.activation = activation  # type: ignore[attr-defined]
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors  # type: ignore[attr-defined]
        found = torch.ops.autoplan.experts_backward(grad.contiguous(), *operands, ctx.activation)  # type: ignore[attr-defined]
        to_hidden, to_weights, to_gate_up, to_down = found
        return to_hidden, None, to_weights, to_gate_up, to_down, None, None


def _with_autograd(*args: object) -> Tensor:
    """Without a gradient to take, the op goes on as itself, so that whoever records it sees one op."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
        found = _Experts.apply(*args)  # type: ignore[no-untyped-call]
    else:
        with below_autograd():
            found = torch.ops.autoplan.experts(*args)
    assert isinstance(found, Tensor)
    return found


def _without_autograd(*args: object) -> Tensor:
    result: Tensor = torch.ops.autoplan.experts_forward(*args[:-1])[0]
    return result


def _fake_forward(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), hidden.new_empty(index.numel(), gate_up.shape[1])


def _fake_backward(
    grad: Tensor, hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *_: object
) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, (hidden, weights, gate_up, down)))


_LIBRARY = torch.library.Library("autoplan", "DEF")  # type: ignore[no-untyped-call]
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
for _name, _kernel, _key in (
    ("experts", _with_autograd, "Autograd"),
    ("experts", _without_autograd, "CompositeExplicitAutograd"),
    ("experts_forward", _forward, "CompositeExplicitAutograd"),
    ("experts_backward", _backward, "CompositeExplicitAutograd"),
):
    _LIBRARY.impl(_name, _kernel, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("autoplan::experts", lambda hidden, *_: torch.empty_like(hidden), lib=_LIBRARY)
torch.library.register_fake("autoplan::experts_forward", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("autoplan::experts_backward", _fake_backward, lib=_LIBRARY)
