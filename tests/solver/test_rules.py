"""Rules prove themselves: every strategy of every row gives the values and gradients of the whole op."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from rule_prover import CPU, as_tuple, node_of, prove, strategies_of
from rule_samples import SAMPLES, UNPROVABLE, Sample, floats, integers, sample
from torch import Tensor

from autoplan.errors import RuleError
from autoplan.ir import OpNode, Ref, TensorMeta
from autoplan.runtime.local_ops import plain_call
from autoplan.sharding import Partial, Replicate, Shard, Strategy, parse_strategy
from autoplan.solver.rules import RULES, block_counts_in, check_rules
from autoplan.solver.saved import SAVED, saved

BLOCKS = frozenset({2, 3})
X, Y, Z, INDEX = Ref("x"), Ref("y"), Ref("z"), Ref("i")
BY_OP: dict[str, list[Sample]] = defaultdict(list)
for _sample in SAMPLES:
    BY_OP[_sample.op].append(_sample)
# ops that work along all their dims, or have none, in each sample
NEVER_SPLIT = {
    *(f"aten.{name}.default" for name in ("max", "min", "any", "all", "prod", "var", "std", "scalar_tensor")),
}
# the first is proved on real ranks in tests/runtime/test_local_ops_ranks.py, the second cannot run yet
COLLECTIVE_FORMS = ("cross_entropy_vocab", "experts_exchange")


def texts(found: tuple[Strategy, ...]) -> list[str]:
    return [str(strategy) for strategy in found]


def ways(used: Sample, degree: int = 2, blocks: frozenset[int] = frozenset()) -> list[str]:
    return texts(strategies_of(used, degree, blocks)[1])


def test_every_op_has_a_sample() -> None:
    assert set(BY_OP) | set(UNPROVABLE) == set(RULES)


@pytest.mark.parametrize("op", sorted(BY_OP))
def test_every_strategy_is_right(op: str) -> None:
    splits = 0
    for used in BY_OP[op]:
        for degree in (2, 3):
            node, found = strategies_of(used, degree, BLOCKS)
            assert len(set(found)) == len(found)
            for strategy in found:
                splits += any(isinstance(p, Shard) for p in (*strategy.inputs, *strategy.outputs))
                if strategy.local in COLLECTIVE_FORMS:
                    continue
                try:
                    prove(used, node, strategy, degree)
                except Exception as error:
                    raise AssertionError(f"{op} {used.args} on {degree} ranks, {strategy}: {error}") from error
    assert splits or op in NEVER_SPLIT


MATMUL = sample("linear.default", X, Y, Z, x=floats(4, 5, 6), y=floats(6, 6), z=floats(6))
SOFTMAX = sample("softmax.int", X, -1, x=floats(4, 6))
GELU = sample("gelu.default", X, x=floats(4, 6))
VIEW = sample("view.default", X, (-1, 6), x=floats(4, 4, 6))


@pytest.mark.parametrize(
    ("used", "wrong"),
    [
        (MATMUL, "Shard(2), Shard(1), Partial -> Replicate"),
        (MATMUL, "Shard(2), Shard(1), Replicate -> Partial"),
        (MATMUL, "Shard(2), Shard(0), Partial -> Partial"),
        (MATMUL, "Replicate, Shard(0), Shard(0) -> Shard(2)"),
        (MATMUL, "Replicate(partial_grad), Shard(0), Shard(0) -> Shard(1)"),
        (MATMUL, "Shard(0), Replicate, Replicate(partial_grad) -> Shard(0)"),
        (MATMUL, "Partial, Replicate(partial_grad), Replicate(partial_grad) -> Partial"),
        (SOFTMAX, "Shard(1) -> Shard(1)"),
        (GELU, "Partial -> Partial"),
        (GELU, "Replicate -> Replicate(partial_grad)"),
        (VIEW, "Shard(1) -> Shard(0)"),
    ],
)
def test_a_wrong_row_is_caught(used: Sample, wrong: str) -> None:
    with pytest.raises((AssertionError, RuntimeError)):
        prove(used, node_of(used), parse_strategy(wrong), 2)


def test_changing_any_split_of_a_row_is_caught() -> None:
    """Every strategy of a linear layer with one placement exchanged for a whole one."""
    node, found = strategies_of(MATMUL, 2, frozenset())
    for strategy in found:
        for i, placement in enumerate(strategy.inputs):
            if isinstance(placement, Shard | Partial):
                whole = Replicate(partial_grad=True)
                wrong = replace(strategy, inputs=(*strategy.inputs[:i], whole, *strategy.inputs[i + 1 :]))
                with pytest.raises((AssertionError, RuntimeError)):
                    prove(MATMUL, node, wrong, 2)


def test_linear_lists_its_ways() -> None:
    used = sample("linear.default", X, Y, Z, x=floats(5, 4, 6), y=floats(18, 6), z=floats(18))
    assert ways(used, 2, frozenset({3})) == [
        "Replicate, Replicate, Replicate -> Replicate",
        "Replicate(partial_grad), Replicate(partial_grad), Replicate(partial_grad) -> Replicate(partial_grad)",
        "Shard(0), Replicate(partial_grad), Replicate(partial_grad) -> Shard(0)",
        "Shard(1), Replicate(partial_grad), Replicate(partial_grad) -> Shard(1)",
        "Replicate(partial_grad), Shard(0), Shard(0) -> Shard(2)",
        "Replicate(partial_grad), Shard(0, blocks=3), Shard(0, blocks=3) -> Shard(2, blocks=3)",
        "Shard(2), Shard(1), Partial -> Partial",
        "Partial, Replicate(partial_grad), Partial -> Partial",
    ]


def test_values_without_gradient_are_plain() -> None:
    used = sample("embedding.default", X, INDEX, x=floats(7, 6), i=integers(7, 4, 5))
    for strategy in strategies_of(used, 2, frozenset())[1]:
        assert strategy.inputs[1] in (Replicate(), Shard(0), Shard(1))


def test_a_merged_projection_is_split_within_its_blocks() -> None:
    used = sample("split.Tensor", X, 6, 2, x=floats(4, 5, 18))
    assert "Shard(2, blocks=3) -> Shard(2), Shard(2), Shard(2)" in ways(used, 2, frozenset({3}))
    assert not any("blocks" in way for way in ways(used, 4, frozenset({3})))


def test_a_head_is_never_split() -> None:
    q, kv = floats(1, 4, 5, 8), floats(1, 2, 5, 8)
    attention = sample("scaled_dot_product_attention.default", X, Y, Z, kwargs={"enable_gqa": True}, x=q, y=kv, z=kv)
    assert "Shard(1), Shard(1), Shard(1) -> Shard(1)" in ways(attention, 2)
    assert not any("Shard(1)" in way for way in ways(attention, 4))
    view = sample("view.default", X, (1, 5, 3, 8), x=floats(1, 5, 24))
    assert not any("Shard(2)" in way for way in ways(view, 2))


def test_causal_attention_keeps_its_queries_together() -> None:
    q = floats(1, 4, 6, 8)
    causal = sample("scaled_dot_product_attention.default", X, Y, Z, None, 0.0, True, x=q, y=q, z=q)
    assert not any("Shard(2)" in way for way in ways(causal))
    free = sample("scaled_dot_product_attention.default", X, Y, Z, x=q, y=q, z=q)
    assert "Shard(2), Replicate(partial_grad), Replicate(partial_grad) -> Shard(2)" in ways(free)


def test_label_smoothing_keeps_the_vocabulary_together() -> None:
    plain = sample("cross_entropy_loss.default", X, INDEX, x=floats(4, 6), i=integers(6, 4))
    smooth = replace(plain, kwargs=(("label_smoothing", 0.1),))
    assert any("cross_entropy_vocab" in way for way in ways(plain))
    assert not any("cross_entropy_vocab" in way for way in ways(smooth))


def test_degree_one_is_whole() -> None:
    assert ways(GELU, 1) == ["Replicate -> Replicate"]


def test_missing_rules_are_listed_together() -> None:
    def node(op: str, line: int) -> OpNode:
        meta = TensorMeta(shape=(2,), dtype="float32")
        return OpNode(
            name=op, op=op, args=(), outputs=(meta,), module_path="h.0", source=f"model.py:{line}, in forward"
        )

    with pytest.raises(RuleError) as caught:
        check_rules([node("aten.strange.default", 3), node("aten.zeros.default", 4), node("custom.op.default", 9)])
    message = str(caught.value)
    assert "aten.strange.default in module h.0 (model.py:3, in forward)" in message
    assert "custom.op.default in module h.0 (model.py:9, in forward)" in message
    assert "zeros" not in message and "add a row" in message


def test_block_counts_are_those_of_equal_splits() -> None:
    three = node_of(sample("split.Tensor", X, 2, -1, x=floats(4, 6)))
    uneven = node_of(sample("split.Tensor", X, 4, -1, x=floats(4, 6)))
    assert block_counts_in([three, uneven]) == {3}


def test_every_op_says_what_it_keeps_for_backward() -> None:
    assert set(SAVED) == set(RULES)
    scaled = node_of(sample("mul.Tensor", X, 0.5, x=floats(4)))
    assert saved(scaled).operands == ()
    assert saved(node_of(sample("mul.Tensor", X, Y, x=floats(4), y=floats(4)))).operands == (0, 1)


def kept_by_autograd(sample: Sample) -> set[str]:
    """Operands and results of an op whose memory autograd holds for the backward pass."""
    node = node_of(sample)
    leaves = {name: sample.tensors[name].clone().requires_grad_(sample.needs_grad(name)) for name in sample.tensors}
    values = {name: x * 1 if x.requires_grad else x for name, x in leaves.items()}
    held: list[Tensor] = []

    def hold(x: Tensor) -> Tensor:
        held.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda x: x):
        results = as_tuple(plain_call(node, tuple(values[name] for name in node.operands), CPU))
    values |= dict(zip(node.results, results, strict=True))
    memory = {x.untyped_storage().data_ptr() for x in held if x.numel() > 1}
    return {name for name, x in values.items() if x.numel() > 1 and x.untyped_storage().data_ptr() in memory}


NO_GRADIENT = ("aten.isfinite.default",)
"""Torch computes it from differentiable steps, but nobody asks for its gradient."""


@pytest.mark.parametrize("sample", [s for s in SAMPLES if s.op not in NO_GRADIENT], ids=lambda s: s.op)
def test_what_autograd_keeps_is_in_the_table(sample: Sample) -> None:
    """A tensor that is kept but not listed would be missing from the predicted memory."""
    node, table = node_of(sample), saved(node_of(sample))
    listed = {node.operands[i] for i in table.operands} | {node.results[i] for i in table.results}
    assert kept_by_autograd(sample) <= listed
