"""What the context axis costs: sizes by hand, and the shapes that are left for the tensor axis."""

import pytest
from context_cases import BLOCK, COMPUTE_BOUND, EXCHANGE, GATHER, case

from autoplan.cluster import Group
from autoplan.sharding import CollectiveKind, Placement, Shard
from autoplan.solver.build import build_problem
from autoplan.solver.context import Context, context_model
from autoplan.solver.context_cost import ContextBytes, context_bytes, context_collectives, prelude_bytes
from autoplan.solver.problem import Axis
from autoplan.solver.rules_context import CONTEXT_ATTENTION
from autoplan.solver.work import ATTENTION_OPS

SAMPLES, LENGTH, HEADS, KV_HEADS, HEAD, SIZE = 4, 12, 4, 2, 4, 8
"""examples/llama.py in float64."""
KEYS = SAMPLES * LENGTH * KV_HEADS * HEAD * SIZE
QUERIES = SAMPLES * LENGTH * HEADS * HEAD * SIZE


def _by_heads(context: Context) -> dict[str, Placement]:
    """What moves, as a tensor split of the heads makes it: heads are dim 2 before, dim 1 after the transpose."""
    return {
        name: Shard(2 if src == Shard(1) else 1) for name, src, dst in context.resolved[BLOCK].moves if dst != Shard(0)
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_gathered_keys_and_values_have_the_sizes_by_hand(tp: int) -> None:
    used = case("llama")
    context = used.context(2, GATHER)
    sources = _by_heads(context)
    forward, backward = context_collectives(context, BLOCK, sources, tp)
    assert [(c.kind, c.num_bytes) for c in forward] == [(CollectiveKind.ALL_GATHER, KEYS // tp)] * 2
    assert [(c.kind, c.num_bytes) for c in backward] == [(CollectiveKind.REDUCE_SCATTER, KEYS // tp)] * 2
    assert all(c.group == Group(size=2, per_node=2) for c in (*forward, *backward))
    apart = Group(size=2, per_node=1)
    forward, _ = context_collectives(context, BLOCK, sources, tp, apart)
    assert {c.group for c in forward} == {apart}
    # kept whole instead of half; with selective recomputation the halves are kept as well
    copies, halves = 2 * KEYS // tp, KEYS // tp
    found = list(context_bytes(context, BLOCK, sources, tp, ("none", "selective", "full")))
    assert [item.kept for item in found] == [copies - halves, copies, 0]
    assert found[0].transient == found[1].transient == found[2].transient - (copies - halves)
    for kind in (0, 2):
        assert context_collectives(context, kind, {}, tp) == ([], [])
        assert context_bytes(context, kind, {}, tp, ("none",)) == (ContextBytes(kept=0, transient=0),)


def test_exchanged_heads_have_the_sizes_by_hand() -> None:
    forward, backward = context_collectives(case("llama").context(2, EXCHANGE), BLOCK, {}, 1)
    for issued in (forward, backward):
        assert {c.kind for c in issued} == {CollectiveKind.ALL_TO_ALL}
        assert sorted(c.num_bytes for c in issued) == [KEYS // 2, KEYS // 2, QUERIES // 2, QUERIES // 2]


def test_heads_are_exchanged_only_where_the_tensor_axis_can_split_the_rest() -> None:
    used = case("llama")
    for tensor_degree, local in ((2, ""), (4, CONTEXT_ATTENTION)):  # of four heads two are left on each of two ranks
        (attention,) = (
            c for n, c in used.context(2, tensor_degree).resolved[BLOCK].nodes if "scaled_dot_product" in n.name
        )
        assert attention.strategy.local == local


def test_what_every_segment_reads_as_a_part_is_kept_as_a_part() -> None:
    used = case("llama")
    tables, labels = 2 * LENGTH * HEAD * SIZE, SAMPLES * LENGTH * 8  # cosines and sines; int64
    assert prelude_bytes(used.model(), used.context(2, GATHER)) == (tables + labels) // 2


@pytest.mark.parametrize("parts", [1, 4])
def test_the_tensor_axis_sees_local_shapes(parts: int) -> None:
    used = case("llama")
    model, context = used.model(parts), used.context(2, GATHER, parts)
    local = context_model(model, context)
    samples = SAMPLES // parts
    crossing = [local.graph.metas[name].shape for name in sorted(context.crossing)]
    assert len(crossing) == 5 and set(crossing) == {(samples, LENGTH // 2, 16)}
    block = used.sg.representative(BLOCK)
    (node,) = (local.nodes[name] for name in block.nodes if local.nodes[name].op in ATTENTION_OPS)
    seen = local.metas_for(node)
    shapes = [seen[name].shape for name in (*node.operands, node.name)]
    rows, keys = (samples, HEADS, LENGTH // 2, HEAD), (samples, HEADS, LENGTH, HEAD)
    assert shapes == [rows, keys, keys, rows]
    axis = Axis(group=Group(size=2, per_node=2), cost=COMPUTE_BOUND)
    problem = build_problem(local, block, axis, sequence=True)
    assert dict(problem.outputs)[block.outputs[0]] == Shard(1)
    before = build_problem(model, block, axis, sequence=True)
    (half,) = (n.candidates[0] for n in problem.nodes if n.name == node.name)
    (whole,) = (n.candidates[0] for n in before.nodes if n.name == node.name)
    assert half.forward_us < whole.forward_us
    head = used.sg.representative(2)
    loss = local.nodes[used.sg.graph.loss or ""]
    assert [local.metas_for(loss)[name].shape[0] for name in loss.operands] == [samples * LENGTH // 2] * 2
    assert {n.name for n in build_problem(local, head, axis, sequence=False).nodes} == set(head.nodes)
