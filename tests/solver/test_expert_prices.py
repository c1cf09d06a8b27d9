"""Rows, work, memory and messages of experts, against counts made by hand and against what autograd keeps."""

import torch
from rule_samples import Sample
from rule_samples import experts as expert_samples
from torch import Tensor

from autoplan.ir import OpNode, Ref, TensorMeta
from autoplan.solver import experts
from autoplan.solver.saved import saved_extra_bytes
from autoplan.solver.work import backward_work, forward_work, work_kind

TOKENS, WIDTH, SLOTS, EXPERTS, INNER = 64, 16, 2, 8, 24
NODE = OpNode(
    name="n", op="autoplan.experts.default", args=(*map(Ref, "abcde"), "silu", EXPERTS),
    outputs=(TensorMeta(shape=(TOKENS, WIDTH), dtype="bfloat16"),),
)  # fmt: skip


def operands(*, tokens: int = TOKENS, held: int = EXPERTS, inner: int = INNER) -> tuple[TensorMeta, ...]:
    shapes = ((tokens, WIDTH), (tokens, SLOTS), (tokens, SLOTS), (held, 2 * inner, WIDTH), (held, WIDTH, inner))
    dtypes = ("bfloat16", "int64", "float32", "bfloat16", "bfloat16")
    return tuple(TensorMeta(shape=shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True))


WHOLE, TOKEN_SPLIT, INNER_SPLIT = operands(), operands(tokens=TOKENS // 4), operands(inner=INNER // 4)
SLICED, EXCHANGED = operands(held=EXPERTS // 4), operands(tokens=TOKENS // 4, held=EXPERTS // 4)


def test_rows_are_shared_by_tokens_and_by_experts_but_not_twice() -> None:
    assert experts.num_rows(NODE, WHOLE) == experts.num_rows(NODE, INNER_SPLIT) == TOKENS * SLOTS
    for local in (TOKEN_SPLIT, SLICED, EXCHANGED):
        assert experts.num_rows(NODE, local) == TOKENS * SLOTS // 4


def test_every_split_over_four_ranks_is_a_quarter_of_the_products() -> None:
    flops = 2 * TOKENS * SLOTS * (WIDTH * 2 * INNER + INNER * WIDTH)
    whole = forward_work(NODE, WHOLE, NODE.outputs)
    assert whole is not None and (whole.flops, whole.kind, work_kind(NODE)) == (flops, "matmul", "matmul")
    for local in (TOKEN_SPLIT, INNER_SPLIT, SLICED, EXCHANGED):
        split = forward_work(NODE, local, NODE.outputs)
        assert split is not None and split.flops == flops // 4
        assert split.num_bytes < whole.num_bytes


def test_backward_is_two_products_each_or_one_when_the_experts_are_frozen() -> None:
    forward = forward_work(NODE, WHOLE, NODE.outputs)
    trained = backward_work(NODE, WHOLE, NODE.outputs, (True, False, True, True, True))
    frozen = backward_work(NODE, WHOLE, NODE.outputs, (True, False, True, False, False))
    assert forward is not None and trained is not None and frozen is not None
    assert (trained.flops, frozen.flops) == (2 * forward.flops, forward.flops)
    assert backward_work(NODE, WHOLE, NODE.outputs, (False,) * 5) is None


def test_few_rows_read_few_experts() -> None:
    each = 3 * WIDTH * INNER * 2
    row = (2 * (2 * WIDTH + 2 * INNER + INNER)) * 2
    result = NODE.outputs[0].num_bytes
    for tokens, read in ((1, 2), (2, 4), (TOKENS, EXPERTS)):
        work = experts.forward_work(NODE, operands(tokens=tokens), NODE.outputs)
        assert work.num_bytes == read * each + tokens * SLOTS * row + result


def test_a_message_holds_a_copy_of_each_token_per_choice() -> None:
    assert experts.dispatch_bytes(NODE, TOKEN_SPLIT) == TOKENS // 4 * SLOTS * WIDTH * 2


def test_an_exchange_keeps_what_arrived_and_what_came_back() -> None:
    rows = TOKENS * SLOTS // 4
    assert saved_extra_bytes(NODE, SLICED, NODE.outputs) == rows * 2 * INNER * 2
    assert saved_extra_bytes(NODE, EXCHANGED, NODE.outputs) == rows * (2 * INNER + 2 * WIDTH) * 2


def kept_beside_operands(sample: Sample) -> int:
    """Bytes that autograd holds and that are no operand."""
    leaves = {n: x.clone().requires_grad_(x.is_floating_point()) for n, x in sample.tensors.items()}
    known = {x.untyped_storage().data_ptr() for x in leaves.values()}
    held: dict[int, int] = {}

    def hold(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in known:
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
        torch.ops.autoplan.experts(*(leaves[a.name] if isinstance(a, Ref) else a for a in sample.args))
    return sum(held.values())


def test_the_kept_bytes_are_those_autograd_keeps() -> None:
    for sample in expert_samples():
        metas = tuple(
            TensorMeta(shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."))
            for x in (sample.tensors[a.name] for a in sample.args if isinstance(a, Ref))
        )
        node = OpNode(name="n", op=sample.op, args=sample.args, outputs=(metas[0],))
        assert experts.kept_bytes(node, metas) == kept_beside_operands(sample)
