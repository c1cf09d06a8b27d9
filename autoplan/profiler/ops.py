"""A case of compute -> something to run on this device, its tensors made beforehand."""

from collections.abc import Callable, Iterator
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor

from autoplan.cost import Call
from autoplan.ir import Arg, TensorMeta, Token
from autoplan.profiler.cases import Attention, Compute, Dispatch, HostCopy, Matmul, OpCase, Stream
from autoplan.profiler.timing import Run
from autoplan.trace.compat import find_op


def make_run(case: Compute, device: torch.device) -> Run | None:
    """What to time; None for an op that cannot be run by itself."""
    match case:
        case Matmul():
            left, right = _random(device, case.dtype, (case.m, case.k)), _random(device, case.dtype, (case.k, case.n))
            return lambda: left @ right
        case Attention():
            shape = (case.batch, case.heads, case.length, case.head)
            q, k, v = (_random(device, case.dtype, shape) for _ in range(3))
            return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
        case Stream():
            return _stream(case, device)
        case Dispatch():
            x = torch.ones(8, device=device, requires_grad=True)
            return lambda: x + x
        case HostCopy():
            source = torch.empty(case.num_bytes, dtype=torch.uint8, device=device)
            target = torch.empty(case.num_bytes, dtype=torch.uint8, pin_memory=True)
            return lambda: target.copy_(source, non_blocking=True)
        case OpCase():
            return _call(case.call, device)
        case _:
            assert_never(case)


def _random(device: torch.device, dtype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(getattr(torch, dtype))


def _stream(case: Stream, device: torch.device) -> Run:
    x = _random(device, case.dtype, (case.num_elements,))
    match case.op:
        case "add":
            y = x.clone()
            return lambda: x + y
        case "gelu":
            return lambda: F.gelu(x)
        case "layer_norm":
            rows = x[: max(1, x.numel() // 256) * 256].view(-1, min(256, x.numel()))
            return lambda: F.layer_norm(rows, rows.shape[-1:])
        case _:
            assert_never(case.op)


def _call(call: Call, device: torch.device) -> Run | None:
    """The op forward as training runs it, or backward through it: the same pass again and again."""
    op = find_op(call.op)
    operands = [_operand(meta, call, i, device) for i, meta in enumerate(call.operands)]
    args = [_value(arg, operands, device) for arg in call.args]
    kwargs = {name: _value(arg, operands, device) for name, arg in call.kwargs}

    def forward() -> object:
        return op(*args, **kwargs)

    if not call.needs:
        return forward
    return _backward(forward, [x for x, need in zip(operands, call.needs, strict=True) if need])


def _backward(forward: Callable[[], object], wanted: list[Tensor]) -> Run | None:
    results = [x for x in _tensors(forward()) if x.requires_grad]
    if not results:
        return None
    gradients = [torch.ones_like(x) for x in results]
    return lambda: torch.autograd.grad(results, wanted, gradients, retain_graph=True, allow_unused=True)


def _operand(meta: TensorMeta, call: Call, position: int, device: torch.device) -> Tensor:
    """Random numbers; indices below anything they may index."""
    dtype = getattr(torch, meta.dtype)
    if not meta.is_float:
        least = min((other.shape[0] for other in call.operands if other.is_float and other.shape), default=2)
        classes = min((other.shape[-1] for other in call.operands if other.is_float and other.shape), default=2)
        most = 2 if meta.dtype == "bool" else max(1, min(least, classes))
        return torch.randint(most, meta.shape, device=device).to(dtype)
    x = torch.randn(meta.shape, device=device).to(dtype)
    return x.requires_grad_(call.needs[position] if call.needs else True)


def _value(arg: Arg, operands: list[Tensor], device: torch.device) -> object:
    if isinstance(arg, tuple):
        return [_value(item, operands, device) for item in arg]
    if not isinstance(arg, Token):
        return arg
    match arg.kind:
        case "value":
            return operands[int(arg.text)]
        case "device":
            return device
        case _:
            return getattr(torch, arg.text.removeprefix("torch."))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def is_too_large(error: BaseException) -> bool:
    """Whether it says that the memory of the device, or of the host, is not enough."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "not enough memory" in str(error)
