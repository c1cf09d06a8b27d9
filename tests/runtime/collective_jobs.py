"""What each rank does in test_collectives.py and test_local_ops_ranks.py; a pool of ranks imports this by name."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autoplan.ir import OpNode, Ref, TensorMeta
from autoplan.runtime.collectives import AxisGroup, redistribute
from autoplan.runtime.layouts import local_part
from autoplan.runtime.local_ops import LocalAxis, LocalUse, local_call, loss_denominator
from autoplan.sharding import Partial, Placement, Replicate, Shard, parse_placement


def axis_of() -> AxisGroup:
    return AxisGroup(group=dist.group.WORLD, size=dist.get_world_size(), coordinate=dist.get_rank())


def part_of(x: Tensor, axis: AxisGroup, placement: Placement, *, summed: bool) -> Tensor:
    """This rank's part; a sum is cut into terms that all ranks draw alike."""
    if isinstance(placement, Shard):
        return local_part(x, placement, axis.size, axis.coordinate).clone()
    if not summed:
        return x.clone()
    generator = torch.Generator().manual_seed(7)
    terms = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(axis.size - 1)]
    return [*terms, x - sum(terms)][axis.coordinate]


def whole_of(x: Tensor, axis: AxisGroup, placement: Placement, whole: Tensor, *, summed: bool) -> None:
    """Check this rank's part against the whole."""
    if summed:
        x = x.clone()
        dist.all_reduce(x)
    expected = local_part(whole, placement, axis.size, axis.coordinate) if isinstance(placement, Shard) else whole
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)


def change(src_text: str, dst_text: str, shape: tuple[int, ...], compiled: bool) -> list[str]:
    """Redistribute a value, check value and gradient, and return the collectives issued, forward then backward."""
    axis, src, dst = axis_of(), parse_placement(src_text), parse_placement(dst_text)
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(shape, dtype=torch.float64, generator=generator)
    grad = torch.randn(shape, dtype=torch.float64, generator=generator)
    x = part_of(value, axis, src, summed=isinstance(src, Partial)).requires_grad_()
    summed = dst == Replicate(partial_grad=True)

    def function(local: Tensor) -> Tensor:
        return redistribute(local * 1.0, src, dst, axis, shape)

    run = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    y = run(x)
    y.backward(part_of(grad, axis, dst, summed=summed))
    whole_of(y.detach(), axis, dst, value, summed=isinstance(dst, Partial))
    assert x.grad is not None
    whole_of(x.grad, axis, src, grad, summed=src == Replicate(partial_grad=True))
    return [] if compiled else issued(src, dst, x.detach(), grad, axis, shape)


def issued(
    src: Placement, dst: Placement, x: Tensor, grad: Tensor, axis: AxisGroup, shape: tuple[int, ...]
) -> list[str]:
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    leaf = x.clone().requires_grad_()
    with CommDebugMode() as mode:
        y = redistribute(leaf, src, dst, axis, shape)
    found.append(names(mode))
    with CommDebugMode() as mode:
        y.backward(part_of(grad, axis, dst, summed=False))
    found.append(names(mode))
    return found


def names(mode: object) -> str:
    counts = mode.get_comm_counts()  # type: ignore[attr-defined]
    return ",".join(sorted(f"{op.__name__}*{count}" for op, count in counts.items() if count))


def all_changes(pairs: list[tuple[str, str, tuple[int, ...]]], compiled: bool) -> list[list[str]]:
    return [change(src, dst, shape, compiled) for src, dst, shape in pairs]


def integers_move() -> None:
    """Values without gradient, of any dtype."""
    axis = axis_of()
    for dtype in (torch.int64, torch.bool):
        whole = (torch.arange(10).reshape(5, 2) % 3).to(dtype)
        x = local_part(whole, Shard(0), axis.size, axis.coordinate)
        assert torch.equal(redistribute(x, Shard(0), Replicate(), axis, (5, 2)), whole)


def vocabulary_loss(reduction: int, ignored: str, weighted: bool, tokens_too: bool, vocabulary: int) -> None:
    """Split logits against the whole loss, forward and backward; two parts of the batch if ``tokens_too``."""
    axis = axis_of()
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(6, vocabulary, dtype=torch.float64, generator=generator)
    target = torch.randint(0, vocabulary, (6,), generator=generator)
    target[{"none": slice(0, 0), "some": slice(1, 4), "first half": slice(0, 3), "all": slice(0, 6)}[ignored]] = -1
    weight = torch.rand(vocabulary, dtype=torch.float64, generator=generator) if weighted else None
    whole = logits.clone().requires_grad_()
    expected = torch.ops.aten.cross_entropy_loss(whole, target, weight, reduction, -1)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    expected.backward(upstream)
    node = loss_node(weighted, reduction)
    x = local_part(logits, Shard(1), axis.size, axis.coordinate).clone().requires_grad_()
    parts = 2 if tokens_too else 1
    losses = [run_loss(node, x, target, weight, axis.group, vocabulary, parts, part) for part in range(parts)]
    found = sum(losses[1:], losses[0]) if reduction else torch.cat(losses)
    found.backward(upstream)
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-10, atol=1e-12, equal_nan=True)
    assert x.grad is not None and whole.grad is not None
    mine = local_part(whole.grad, Shard(1), axis.size, axis.coordinate)
    torch.testing.assert_close(x.grad, mine, rtol=1e-10, atol=1e-12, equal_nan=True)


def loss_node(weighted: bool, reduction: int) -> OpNode:
    return OpNode(
        name="loss",
        op="aten.cross_entropy_loss.default",
        args=(Ref("x"), Ref("t"), Ref("w") if weighted else None, reduction, -1),
        outputs=(TensorMeta(shape=() if reduction else (6,), dtype="float64"),),
    )


def run_loss(
    node: OpNode, x: Tensor, target: Tensor, weight: Tensor | None, group: ProcessGroup | None,
    vocabulary: int, parts: int, part: int,
) -> Tensor:  # fmt: skip
    form = "cross_entropy_tokens" if parts > 1 and node.args[3] == 1 else ""
    weights = () if weight is None else (weight,)
    use = LocalUse(
        node=node,
        shapes=((6, vocabulary), (6,), (vocabulary,))[: 2 + len(weights)],
        batch=LocalAxis(size=parts, coordinate=part, group=None, form=form),
        tensor=LocalAxis(
            size=dist.get_world_size(), coordinate=dist.get_rank(), group=group, form="cross_entropy_vocab"
        ),
        device=torch.device("cpu"),
    )
    rows, labels = x.chunk(parts)[part], target.chunk(parts)[part]
    denominator = loss_denominator(node, target, *weights) if form else None
    return local_call(use, (rows, labels, *weights), denominator)


def all_losses(cases: list[tuple[int, str, bool, bool, int]]) -> None:
    for case in cases:
        vocabulary_loss(*case)


def loss_in_bfloat16_and_collectives() -> str:
    """A loss in half precision is close to torch's, and issues two all-reduces forward, none backward."""
    from torch.distributed.tensor.debug import CommDebugMode

    axis = axis_of()
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    target = torch.tensor([0, 1, 2, 7, 7, -1])
    x = local_part(logits, Shard(1), axis.size, axis.coordinate).clone().requires_grad_()
    with CommDebugMode() as forward:
        loss = run_loss(loss_node(False, 1), x, target, None, axis.group, 8, 1, 0)
    with CommDebugMode() as backward:
        loss.backward()
    expected = torch.nn.functional.cross_entropy(logits, target, ignore_index=-1)
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss.detach(), expected, rtol=2e-2, atol=2e-2)
    return f"{names(forward)} / {names(backward)}"


def unknown_label() -> bool:
    axis = axis_of()
    x = torch.randn(6, 4)
    return bool(run_loss(loss_node(False, 1), x, torch.tensor([0, 1, 2, 9, 7, -1]), None, axis.group, 8, 1, 0).isnan())
