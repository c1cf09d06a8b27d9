"""The split of the sequence: all ranks together give one device's loss and gradients; sizes are those by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import zoo
from context_cases import BLOCK, COMPUTE_BOUND, DENSE, EXCHANGE, GATHER, MIXTURES, Case, case
from context_ranks import Ranks, context_attention, join
from test_batch import build, op
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from autoplan.cluster import Cluster, Group
from autoplan.ir import Graph, OpNode, Ref, Segment, SegmentedGraph, TensorMeta
from autoplan.sharding import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, CollectiveKind, Partial, Replicate, Shard
from autoplan.solver.batch import split_batch
from autoplan.solver.build import make_model
from autoplan.solver.choice import Resolved
from autoplan.solver.context import Context, context_degrees, make_context, obstacle
from autoplan.solver.context_cost import context_collectives
from autoplan.solver.problem import Axis
from autoplan.solver.rules import strategies
from autoplan.solver.rules_context import CONTEXT_ATTENTION
from autoplan.solver.work import ATTENTION_OPS, forward_work


def check_numbers(used: Case, context: Context) -> None:
    """Raise AssertionError unless the ranks together give the loss and the gradients of one device."""
    leaves = {
        param.value: tuple(used.whole[param.value].clone().requires_grad_() for _ in range(context.degree))
        for param in used.sg.graph.params
    }
    with zoo.InFloat64():
        loss = join(Ranks(sg=used.sg, context=context, whole=used.whole).loss(leaves), PARTIAL)
        loss.backward()
    torch.testing.assert_close(loss.detach(), used.whole[used.sg.graph.loss or ""], rtol=1e-10, atol=1e-12)
    for name, expected in used.grads.items():
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves[name]]
        torch.testing.assert_close(torch.stack(found).sum(0), expected, rtol=1e-8, atol=1e-11)


WAYS = [(name, *way) for name in (*DENSE, *MIXTURES) for way in ((2, EXCHANGE, 4), (3, GATHER, 4))]
WAYS += [(name, 2, GATHER, 1) for name in ("llama", "hf-gpt2")]


@pytest.mark.parametrize(("name", "degree", "tensor_degree", "batch"), WAYS)
def test_all_ranks_give_the_numbers_of_one_device(name: str, degree: int, tensor_degree: int, batch: int) -> None:
    used = case(name, batch)
    check_numbers(used, used.context(degree, tensor_degree))


def mutated(context: Context, change: Callable[[Resolved], Resolved]) -> Context:
    resolved = list(context.resolved)
    resolved[BLOCK] = change(resolved[BLOCK])
    return replace(context, resolved=tuple(resolved))


def _lose_key_gradients(resolved: Resolved) -> Resolved:
    """Keys and values as if every rank had their whole gradient."""
    nodes = tuple(
        (n, replace(c, strategy=replace(c.strategy, inputs=(c.strategy.inputs[0], REPLICATE, REPLICATE))))
        if c.strategy.local == CONTEXT_ATTENTION
        else (n, c)
        for n, c in resolved.nodes
    )
    return replace(resolved, nodes=nodes)


def _mask_by_local_position(resolved: Resolved) -> Resolved:
    nodes = tuple((n, replace(c, strategy=replace(c.strategy, local=""))) for n, c in resolved.nodes)
    return replace(resolved, nodes=nodes)


@pytest.mark.parametrize("wrong", [_lose_key_gradients, _mask_by_local_position])
def test_a_wrong_way_is_caught(wrong: Callable[[Resolved], Resolved]) -> None:
    used = case("nanogpt")
    context = used.context(2, GATHER)
    with pytest.raises(AssertionError):
        check_numbers(used, mutated(context, wrong))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", DENSE)
def test_every_activation_is_split_and_every_parameter_shared(name: str, parts: int) -> None:
    used = case(name)
    exchange, gather = used.context(2, EXCHANGE, parts), used.context(2, GATHER, parts)
    for context in (exchange, gather):
        for kind, resolved in enumerate(context.resolved):
            for node, candidate in resolved.nodes:
                made = candidate.strategy.outputs
                if node.name == used.sg.graph.loss:
                    assert made == (PARTIAL,)
                elif not all(isinstance(place, Shard) for place in made):
                    assert context is gather and node.is_view  # keys and values on their way to attention
            for name_ in used.sg.representative(kind).params:
                wanted = {
                    place
                    for node, candidate in resolved.nodes
                    for value, place in zip(node.operands, candidate.strategy.inputs, strict=True)
                    if value == name_
                }
                assert wanted == {REPLICATE_PARTIAL_GRAD} and resolved.sources[name_] == REPLICATE_PARTIAL_GRAD
    assert all(exchange.crossing[name_] == Shard(1) for name_ in exchange.crossing)
    for context, heads, rows in ((exchange, Shard(1), Shard(1)), (gather, REPLICATE_PARTIAL_GRAD, Shard(2))):
        (attention,) = (c for n, c in context.resolved[BLOCK].nodes if "scaled_dot_product" in n.name)
        query, keys, values, *_ = attention.strategy.inputs
        assert (query, keys, values) == (rows, heads, heads)


def test_tokens_merged_from_several_samples_are_split_within_each() -> None:
    used = case("hf-mixtral")
    context = used.context(2, GATHER)
    (experts,) = (c for n, c in context.resolved[BLOCK].nodes if n.name.startswith("experts"))
    assert experts.strategy.inputs[:3] == (Shard(0, 4),) * 3 and experts.strategy.outputs == (Shard(0, 4),)
    assert experts.strategy.inputs[3:] == (REPLICATE_PARTIAL_GRAD,) * 2


def _orders(length: int, degree: int) -> dict[str, list[Tensor]]:
    """Positions of each rank: in one piece, or in two so that causal work is even."""
    pieces = torch.arange(length).chunk(2 * degree)
    return {
        "plain": list(torch.arange(length).chunk(degree)),
        "zig-zag": [torch.cat([pieces[rank], pieces[-1 - rank]]) for rank in range(degree)],
    }


def _attention(kv_heads: int) -> tuple[OpNode, list[Tensor]]:
    torch.manual_seed(0)
    sizes = ((2, 4, 12, 5), (2, kv_heads, 12, 5), (2, kv_heads, 12, 5))
    tensors = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
    node = OpNode(
        name="a", op="aten.scaled_dot_product_attention.default",
        args=(Ref("q"), Ref("k"), Ref("v"), None, 0.0, True), kwargs=(("scale", 0.3), ("enable_gqa", True)),
        outputs=(TensorMeta(shape=sizes[0], dtype="float64"),),
    )  # fmt: skip
    return node, tensors


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize("order", ["plain", "zig-zag"])
def test_queries_may_be_split_in_any_order(order: str, degree: int, kv_heads: int) -> None:
    node, (query, key, value) = _attention(kv_heads)
    whole = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    upstream = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, (query, key, value), upstream)
    found = [torch.zeros_like(x) for x in expected]
    for positions in _orders(12, degree)[order]:
        operands = (query[:, :, positions].detach().requires_grad_(), key, value)
        part = context_attention(node, operands, positions)
        torch.testing.assert_close(part, whole[:, :, positions], rtol=1e-10, atol=1e-12)
        rows, *sums = torch.autograd.grad(part, operands, upstream[:, :, positions])
        found[0][:, :, positions] = rows
        found[1:] = [a + b for a, b in zip(found[1:], sums, strict=True)]
    torch.testing.assert_close(tuple(found), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("degree", [2, 3])
def test_each_rank_is_charged_its_share_of_causal_work(degree: int) -> None:
    pairs = [int((rank[:, None] >= torch.arange(12)).sum()) for rank in _orders(12, degree)["zig-zag"]]
    assert len(set(pairs)) == 1 and sum(pairs) == 12 * 13 // 2
    node, tensors = _attention(4)
    metas = tuple(TensorMeta(shape=tuple(x.shape), dtype="float64") for x in tensors)
    mine = replace(metas[0], shape=(2, 4, 12 // degree, 5))
    whole = forward_work(node, metas, node.outputs)
    part = forward_work(node, (mine, *metas[1:]), (mine,))
    assert whole is not None and part is not None and part.flops * degree == whole.flops


@pytest.mark.parametrize("name", DENSE)
def test_the_tensor_axis_has_no_such_row(name: str) -> None:
    graph = case(name).sg.graph
    nodes = [node for node in graph.nodes if node.op in ATTENTION_OPS]
    found = [way for node in nodes for way in strategies(node, graph.metas, lambda _: True, 2)]
    assert found and all(way.local != CONTEXT_ATTENTION for way in found)


def cluster(nodes: int, devices: int) -> Cluster:
    return Cluster(num_nodes=nodes, devices_per_node=devices, device="toy", memory_bytes=1)


def test_degrees_divide_devices_and_leave_each_rank_two_equal_pieces() -> None:
    used = case("llama")
    assert obstacle(used.sg, used.split) == ""
    assert context_degrees(used.sg, used.split, cluster(1, 8)) == (1, 2)
    assert context_degrees(used.sg, used.split, cluster(3, 4)) == (1, 2, 3, 6)


def chain(*nodes: OpNode) -> SegmentedGraph:
    """One segment per node, each of a class of its own; the input and every result are [4, 6, ...]."""
    graph = replace_input(build(*nodes, loss=nodes[-1].name, outputs=(nodes[-1].name,)), nodes[0].outputs[0])
    made = {name for node in nodes for name in node.results}
    segments = tuple(
        Segment(
            kind=kind, nodes=(node.name,), params=tuple(n for n in node.operands if n.startswith("param")),
            inputs=tuple(n for n in node.operands if n in made or n.startswith("input")), outputs=node.results,
        )
        for kind, node in enumerate(nodes)
    )  # fmt: skip
    return SegmentedGraph(graph=graph, prelude=(), segments=segments, kind_names=tuple(n.name for n in nodes))


def replace_input(graph: Graph, meta: TensorMeta) -> Graph:
    return replace(graph, inputs=(replace(graph.inputs[0], meta=meta),))


def test_without_a_sequence_there_is_a_reason() -> None:
    sg = chain(op("y", "linear.default", "input:0", "param:w", shape=(4, 6)), op("loss", "sum.default", "y", shape=()))
    split = split_batch(sg)
    assert "no value with a sequence dim" in obstacle(sg, split)
    assert context_degrees(sg, split, cluster(1, 8)) == (1,)


def test_an_op_that_mixes_positions_runs_whole_and_its_gathers_are_charged() -> None:
    sg = chain(
        op("y", "linear.default", "input:0", "param:w", shape=(4, 8, 6)),
        op("mixed", "cumsum.default", "y", 1, shape=(4, 8, 6)),
        op("z", "linear.default", "mixed", "param:w", shape=(4, 8, 6)),
        op("loss", "sum.default", "z", shape=()),
    )
    split = split_batch(sg)
    axis = Axis(group=Group(size=2, per_node=2), cost=COMPUTE_BOUND)
    context = make_context(make_model(sg, split, 1), split, axis)
    ways = [next(iter(context.strategies(kind).values())) for kind in range(4)]
    assert ways[0].outputs == ways[2].outputs == (Shard(1),) and isinstance(ways[3].outputs[0], Partial)
    assert ways[1].inputs == ways[1].outputs and isinstance(ways[1].outputs[0], Replicate)
    forward, backward = context_collectives(context, 1, {}, 1)
    whole = 4 * 8 * 6 * 4
    assert [(c.kind, c.num_bytes) for c in forward] == [(CollectiveKind.ALL_GATHER, whole)]
    assert [c.num_bytes for c in backward] == [whole]
    assert context_collectives(context, 0, {}, 1) == context_collectives(context, 2, {}, 1) == ([], [])


def test_samples_that_cannot_be_told_apart_are_a_reason() -> None:
    sg = chain(
        op("y", "softmax.int", "input:0", 0, shape=(4, 8, 6)),
        op("z", "linear.default", "y", "param:w", shape=(4, 8, 6)),
        op("loss", "sum.default", "z", shape=()),
    )
    assert "positions cannot be told from samples" in obstacle(sg, split_batch(sg))
