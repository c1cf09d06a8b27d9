"""Prove a strategy: run the op on the parts of all ranks in one process, combine, compare with the whole op."""

from collections.abc import Sequence

import torch
from rule_samples import Sample
from torch import Tensor

from autoplan.ir import OpNode, TensorMeta
from autoplan.localize import localize_node
from autoplan.runtime.layouts import local_part
from autoplan.runtime.local_ops import (
    LocalAxis,
    LocalUse,
    denominator_operands,
    local_call,
    loss_denominator,
    plain_call,
)
from autoplan.sharding import Partial, Placement, Replicate, Shard, Strategy, local_shape
from autoplan.solver.rules import strategies

CPU = torch.device("cpu")


def meta_of(x: Tensor) -> TensorMeta:
    return TensorMeta(shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))


def node_of(sample: Sample) -> OpNode:
    """The node with the results torch makes."""
    bare = OpNode(name="n", op=sample.op, args=sample.args, kwargs=sample.kwargs, outputs=())
    results = as_tuple(plain_call(bare, tuple(sample.tensors[name] for name in bare.operands), CPU))
    outputs = tuple(meta_of(x) for x in results)
    return OpNode(name="n", op=sample.op, args=sample.args, kwargs=sample.kwargs, outputs=outputs)


def strategies_of(sample: Sample, degree: int, blocks: frozenset[int]) -> tuple[OpNode, tuple[Strategy, ...]]:
    node = node_of(sample)
    metas = {name: meta_of(x) for name, x in sample.tensors.items()}
    metas |= dict(zip(node.results, node.outputs, strict=True))
    grads = {name for name in sample.tensors if sample.needs_grad(name)}
    grads |= {name for name, x in zip(node.results, whole_run(sample, node)[1], strict=True) if x.requires_grad}
    return node, strategies(node, metas, grads.__contains__, degree, blocks)


def as_tuple(result: object) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


def leaves(sample: Sample, node: OpNode, tensors: Sequence[Tensor]) -> list[Tensor]:
    wanted = [sample.needs_grad(name) for name in node.operands]
    return [x.clone().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)]


def whole_run(sample: Sample, node: OpNode) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    operands = leaves(sample, node, [sample.tensors[name] for name in node.operands])
    return operands, as_tuple(plain_call(node, tuple(operands), CPU))


def noise(x: Tensor) -> Tensor:
    """Random multiples of 1/64, which float32 adds without rounding, so that casts are proved exactly too."""
    return torch.round(64 * torch.randn_like(x)) / 64


def split(x: Tensor, placement: Placement, degree: int, *, summed: bool) -> list[Tensor]:
    """Parts of all ranks; a sum is cut into random terms. ``summed`` says whether whole means the sum."""
    if isinstance(placement, Shard):
        return [local_part(x, placement, degree, i).contiguous() for i in range(degree)]
    if not summed:
        return [x] * degree
    terms = [noise(x) for _ in range(degree - 1)]
    return [*terms, x - sum(terms)]


def check(parts: list[Tensor], placement: Placement, expected: Tensor, *, summed: bool) -> None:
    """Raise AssertionError unless the parts of all ranks are those of ``expected``."""
    degree, shape = len(parts), tuple(expected.shape)
    for i, part in enumerate(parts):
        assert tuple(part.shape) == local_shape(shape, placement, degree, i), "a part has a wrong shape"
    if isinstance(placement, Shard):
        for i, part in enumerate(parts):
            same(part, local_part(expected, placement, degree, i))
    elif summed:
        same(torch.stack(parts).sum(0), expected)
    else:
        for part in parts:
            same(part, expected)


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def run_rank(
    sample: Sample, node: OpNode, strategy: Strategy, operands: list[Tensor], size: int, rank: int
) -> tuple[Tensor, ...]:
    if not strategy.local:
        return as_tuple(plain_call(localize_node(node, strategy, size, rank), tuple(operands), CPU))
    denominator = None
    if strategy.local == "cross_entropy_tokens":
        denominator = loss_denominator(node, *(sample.tensors[name] for name in denominator_operands(node)))
    use = LocalUse(
        node=node,
        shapes=tuple(tuple(sample.tensors[name].shape) for name in node.operands),
        batch=LocalAxis(size=1, coordinate=0, group=None, form=""),
        tensor=LocalAxis(size=size, coordinate=rank, group=None, form=strategy.local),
        device=CPU,
    )
    return as_tuple(local_call(use, tuple(operands), denominator))


def prove(sample: Sample, node: OpNode, strategy: Strategy, degree: int) -> None:
    """Raise AssertionError (or torch's own error) unless values and gradients come out right."""
    torch.manual_seed(0)
    whole_operands, whole_results = whole_run(sample, node)
    parts = [
        split(x.detach(), placement, degree, summed=isinstance(placement, Partial))
        for x, placement in zip(whole_operands, strategy.inputs, strict=True)
    ]
    operands = [leaves(sample, node, [part[rank] for part in parts]) for rank in range(degree)]
    results = [run_rank(sample, node, strategy, operands[rank], degree, rank) for rank in range(degree)]
    for i, (placement, expected) in enumerate(zip(strategy.outputs, whole_results, strict=True)):
        values = [rank[i].detach() for rank in results]
        check(values, placement, expected.detach(), summed=isinstance(placement, Partial))
    differentiable = [i for i, x in enumerate(whole_results) if x.requires_grad]
    if differentiable:
        _prove_gradients(strategy, whole_operands, whole_results, operands, results, differentiable)


def _prove_gradients(
    strategy: Strategy,
    whole_operands: list[Tensor],
    whole_results: tuple[Tensor, ...],
    operands: list[list[Tensor]],
    results: list[tuple[Tensor, ...]],
    differentiable: list[int],
) -> None:
    degree = len(operands)
    upstream = [noise(whole_results[i].detach()) for i in differentiable]
    parts = [
        split(grad, strategy.outputs[i], degree, summed=strategy.outputs[i] == Replicate(partial_grad=True))
        for i, grad in zip(differentiable, upstream, strict=True)
    ]
    wanted = [i for i, x in enumerate(whole_operands) if x.requires_grad]
    expected = _grads([whole_results[i] for i in differentiable], [whole_operands[i] for i in wanted], upstream)
    found = [
        _grads(
            [results[rank][i] for i in differentiable],
            [operands[rank][i] for i in wanted],
            [part[rank] for part in parts],
        )
        for rank in range(degree)
    ]
    for k, i in enumerate(wanted):
        placement = strategy.inputs[i]
        summed = placement == Replicate(partial_grad=True)
        check([grads[k] for grads in found], placement, expected[k], summed=summed)


def _grads(results: list[Tensor], operands: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    pairs = [(x, grad) for x, grad in zip(results, upstream, strict=True) if x.requires_grad]
    if not pairs:
        return [torch.zeros_like(x) for x in operands]
    found = torch.autograd.grad([x for x, _ in pairs], operands, [grad for _, grad in pairs], allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(operands, found, strict=True)]
