"""Random legal plans: any strategy of the rule table for each op, not only those a cost model would choose."""

import random
from collections.abc import Mapping, Sequence

from autoplan.cluster import Cluster, Mesh
from autoplan.ir import OpNode, Segment, SegmentedGraph, TensorMeta
from autoplan.localize import localize
from autoplan.plan.data_axis import data_placement
from autoplan.plan.plan import (
    RECOMPUTE,
    Amounts,
    DataMode,
    Layout,
    LayoutCost,
    OpPlacement,
    ParamPlacement,
    Plan,
    Proof,
    Recompute,
    Stage,
)
from autoplan.sharding import REPLICATE, REPLICATE_PARTIAL_GRAD, Partial, Placement, Shard, Strategy, can_split
from autoplan.solver.batch import split_batch
from autoplan.solver.rules import block_counts_in, grad_values, strategies

NOTHING = LayoutCost(
    forward_us=0, backward_us=0, forward_comm_us=0, backward_comm_us=0, activation_bytes=0, transient_bytes=0,
    collectives=(),
)  # fmt: skip


def random_plan(
    segmented: SegmentedGraph,
    *,
    pp: int,
    dp: int,
    tp: int,
    microbatches: int,
    seed: int,
    data: DataMode = "replicate",
    recompute: Recompute | None = None,
    model: str = "random",
    split_weights: bool = False,
) -> Plan:
    """``split_weights``: every op that reads a parameter splits it where some row does (column, row, vocabulary)."""
    choose = random.Random(seed)
    batch = split_batch(segmented)
    assert not batch.obstacle, batch.obstacle
    parts = dp * microbatches
    graph = localize(segmented.graph, batch.strategy_of, batch.placement_of, parts)
    needs = grad_values(graph)
    nodes = {n.name: n for n in graph.nodes}
    boundary = choose.random() < 0.5
    crossing = {v for s in segmented.segments for v in s.inputs if v in graph.node_of} - {
        r for name in segmented.prelude for r in nodes[name].results
    }
    layouts: dict[int, Layout] = {}
    wanted: dict[str, list[Placement]] = {}
    for kind in range(len(segmented.kind_names)):
        segment = segmented.representative(kind)
        ops = []
        blocks = block_counts_in([nodes[n] for n in segment.nodes])
        for name in segment.nodes:
            node = nodes[name]
            found = strategies(node, graph.metas, needs.__contains__, tp, blocks)
            split = [s for s in found if _splits_a_weight(node, s)] if split_weights else []
            pick = choose.choice(split or found)
            ops.append(OpPlacement(node=name, batch=batch.strategy(name), tensor=pick))
            for operand, placement in zip(node.operands, pick.inputs, strict=True):
                if operand.startswith("param:") and not isinstance(placement, Partial):
                    wanted.setdefault(operand, []).append(placement)
        made = {r: p for op in ops for r, p in zip(nodes[op.node].results, op.tensor.outputs, strict=True)}

        def leaves(value: str, made: dict[str, Placement] = made) -> Placement:
            if value == graph.loss:
                return REPLICATE
            return _arrival(value, graph.metas, crossing, boundary, tp) if value in crossing else made[value]

        layouts[kind] = Layout(
            name=segmented.kind_names[kind],
            kind=kind,
            recompute=recompute or choose.choice(RECOMPUTE),
            ops=tuple(ops),
            inputs=tuple(_arrival(v, graph.metas, crossing, boundary, tp) for v in segment.inputs),
            outputs=tuple(leaves(v) for v in segment.outputs),
            cost=NOTHING,
        )
    placements = _param_placements(segmented, wanted, choose, dp, tp, data)
    return Plan(
        version="test",
        model=model,
        graph_digest=segmented.graph.digest,
        dtype="float64",
        batch_size=segmented.graph.batch_size,
        cluster=Cluster(num_nodes=1, devices_per_node=pp * dp * tp, device="cpu", memory_bytes=1 << 30),
        profile_digest="",
        mesh=Mesh(axes=("pp", "dp", "cp", "tp"), sizes=(pp, dp, 1, tp)),
        schedule="1f1b",
        num_microbatches=microbatches,
        data=data,
        shards=dp if data == "shard" else 1,
        kind_names=segmented.kind_names,
        segment_kinds=tuple(s.kind for s in segmented.segments),
        segment_params=tuple(tuple(p.removeprefix("param:") for p in s.params) for s in segmented.segments),
        prelude=tuple((n, batch.strategy(n)) for n in segmented.prelude),
        inputs=batch.inputs,
        params=placements,
        layouts=tuple(layouts.values()),
        stages=_stages(segmented, layouts, pp, choose),
        step=Amounts(by_cause=()),
        runners_up=(),
        proof=Proof(status="complete", bound_us=0.0, bound_by="nothing", num_solved=0, num_bounded=0, num_refused=0),
        assumptions=(),
    )


def _splits_a_weight(node: OpNode, strategy: Strategy) -> bool:
    pairs = zip(node.operands, strategy.inputs, strict=True)
    return any(name.startswith("param:") and isinstance(placement, Shard) for name, placement in pairs)


def _arrival(value: str, metas: Mapping[str, TensorMeta], crossing: set[str], sequence: bool, tp: int) -> Placement:
    shape = metas[value].shape
    if sequence and value in crossing and len(shape) >= 3 and can_split(shape[1], tp):
        return Shard(1)
    return REPLICATE


def _param_placements(
    segmented: SegmentedGraph,
    wanted: Mapping[str, Sequence[Placement]],
    choose: random.Random,
    dp: int,
    tp: int,
    data: DataMode,
) -> tuple[ParamPlacement, ...]:
    """One placement per parameter of a class, the same for all its segments."""
    chosen: dict[str, Placement] = {}
    for segment in segmented.segments:
        first: Segment = segmented.representative(segment.kind)
        for value, like in zip(segment.params, first.params, strict=True):
            if value not in chosen:
                if like not in chosen:
                    options = [p if p != REPLICATE else REPLICATE_PARTIAL_GRAD for p in wanted.get(like, ())]
                    split = [p for p in options if isinstance(p, Shard)]
                    chosen[like] = choose.choice(split or [*options, REPLICATE_PARTIAL_GRAD])
                chosen[value] = chosen[like]
    return tuple(
        ParamPlacement(
            name=p.name, tensor=chosen[p.value],
            data=data_placement(p.meta.shape, chosen[p.value], dp) if data == "shard" else REPLICATE,
        )
        for p in segmented.graph.params
    )  # fmt: skip


def _stages(
    segmented: SegmentedGraph, layouts: Mapping[int, Layout], pp: int, choose: random.Random
) -> tuple[Stage, ...]:
    count = len(segmented.segments)
    cuts = [0, *sorted(choose.sample(range(1, count), pp - 1)), count]
    return tuple(
        Stage(
            rank=i, start=a, end=b, layouts=tuple(layouts[s.kind].name for s in segmented.segments[a:b]), forward_us=0,
            backward_us=0, memory=Amounts(by_cause=()), collectives=(),
        )
        for i, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))
    )  # fmt: skip
