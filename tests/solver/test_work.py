"""FLOPs and bytes of ops, against counts made by hand."""

import pytest

from autoplan.ir import OpNode, Ref, TensorMeta, Token
from autoplan.solver.work import backward_work, forward_work, weight_share


def meta(*shape, dtype="bfloat16"):
    return TensorMeta(shape=shape, dtype=dtype)


def node(op, *args, outputs, kwargs=()):
    return OpNode(name="n", op=op, args=args, kwargs=kwargs, outputs=outputs)


def test_linear_counts_two_flops_per_product_and_two_products_backward():
    operands, results = (meta(4, 8, 16), meta(32, 16), meta(32)), (meta(4, 8, 32),)
    linear = node("aten.linear.default", Ref("x"), Ref("w"), Ref("b"), outputs=results)
    forward = forward_work(linear, operands, results)
    assert (forward.kind, forward.flops) == ("matmul", 2 * 4 * 8 * 32 * 16)
    assert forward.num_bytes == 2 * (4 * 8 * 16 + 32 * 16 + 32 + 4 * 8 * 32)
    both = backward_work(linear, operands, results, (True, True, True))
    assert (both.flops, both.launches) == (2 * forward.flops, 2)
    assert backward_work(linear, operands, results, (True, False, False)).flops == forward.flops
    assert backward_work(linear, operands, results, (False, False, False)) is None


def test_addmm_takes_the_inner_size_from_the_first_matrix():
    operands, results = (meta(6), meta(4, 5), meta(5, 6)), (meta(4, 6),)
    assert forward_work(node("aten.addmm.default", outputs=results), operands, results).flops == 2 * 4 * 6 * 5


def test_einsum_multiplies_all_sizes():
    operands, results = (meta(2, 3, 4), meta(4, 5)), (meta(2, 3, 5),)
    einsum = node("aten.einsum.default", "bij,jk->bik", (Ref("x"), Ref("y")), outputs=results)
    assert forward_work(einsum, operands, results).flops == 2 * 2 * 3 * 4 * 5


@pytest.mark.parametrize("causal", [False, True])
def test_attention_halves_a_causal_mask_and_costs_two_and_a_half_backward(causal):
    q = meta(2, 4, 128, 16)
    attention = node(
        "aten.scaled_dot_product_attention.default", Ref("q"), Ref("k"), Ref("v"), None, 0.0, causal, outputs=(q,)
    )
    forward = forward_work(attention, (q, q, q), (q,))
    assert (forward.kind, forward.flops) == ("attention", 4 * 2 * 4 * 128 * 128 * 16 // (2 if causal else 1))
    assert backward_work(attention, (q, q, q), (q,), (True,) * 3).flops == forward.flops * 5 // 2


def test_views_and_casts_to_the_same_dtype_are_no_work():
    x = meta(4, 8)
    view = node("aten.view.default", Ref("x"), (8, 4), outputs=(meta(8, 4),))
    assert forward_work(view, (x,), (meta(8, 4),)) is None
    assert backward_work(view, (x,), (meta(8, 4),), (True,)) is None
    same = node("aten.to.dtype", Ref("x"), Token("dtype", "bfloat16"), outputs=(x,))
    other = node("aten.to.dtype", Ref("x"), Token("dtype", "float32"), outputs=(meta(4, 8, dtype="float32"),))
    assert forward_work(same, (x,), same.outputs) is None
    assert forward_work(other, (x,), other.outputs).num_bytes == 4 * 8 * (2 + 4)


def test_embedding_reads_rows_not_the_table():
    operands, results = (meta(1000, 8), meta(2, 3, dtype="int64")), (meta(2, 3, 8),)
    embedding = node("aten.embedding.default", Ref("w"), Ref("i"), outputs=results)
    assert forward_work(embedding, operands, results).num_bytes == 2 * results[0].num_bytes + 2 * 3 * 8
    assert backward_work(embedding, operands, results, (True, False)).num_bytes >= operands[0].num_bytes


def test_an_addition_costs_backward_only_where_it_broadcasts():
    x = meta(4, 8)
    add = node("aten.add.Tensor", Ref("x"), Ref("y"), outputs=(x,))
    assert backward_work(add, (x, x), (x,), (True, True)) is None
    assert backward_work(add, (x, meta(8)), (x,), (True, True)) is not None


def test_halving_a_shape_halves_its_work():
    whole, half = (meta(8, 16), meta(32, 16)), (meta(4, 16), meta(32, 16))
    linear = node("aten.linear.default", outputs=(meta(8, 32),))
    assert forward_work(linear, whole, (meta(8, 32),)).flops == 2 * forward_work(linear, half, (meta(4, 32),)).flops


def test_products_with_parameters_are_their_share_of_the_backward_pass():
    def share(op, operands, needs, weights):
        used = node(op, *(Ref(str(i)) for i in range(len(operands))), outputs=(meta(4, 32),))
        return weight_share(used, operands, needs, weights)

    linear = (meta(4, 16), meta(32, 16), meta(32))
    assert share("aten.linear.default", linear, (True, True, True), (False, True, True)) == 0.5
    assert share("aten.linear.default", linear, (False, True, True), (False, True, True)) == 1.0
    assert share("aten.linear.default", linear, (True, False, False), (False, True, True)) == 0.0
    assert share("aten.mm.default", (meta(4, 16), meta(16, 32)), (True, True), (False, False)) == 0.0
    assert share("aten.mul.Tensor", (meta(4, 32), meta(32)), (True, True), (False, True)) == 0.0
