"""The whole search on a small GPT with a tied head: complete, deterministic, within memory, never beaten by a pin."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from toy_cost import ToyCost

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, InputError
from autoplan.plan.schedule import RankTimes, step_us
from autoplan.plan.verify import verify_plan, verify_plan_for
from autoplan.sharding import REPLICATE, REPLICATE_PARTIAL_GRAD, CollectiveKind, Shard
from autoplan.solver.block import solve_block
from autoplan.solver.problem import Prices
from autoplan.solver.request import GAP, Request
from autoplan.solver.solve import prepare, solve
from autoplan.solver.tables import TableKey, solve_variants, sweep
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import nanogpt  # noqa: E402  the examples are no package

GIB = 2**30
REQUEST = Request(model="nano", dtype="float32")


@cache
def gpt():
    config = nanogpt.Config(num_layers=2)
    return segment_graph(trace_model(nanogpt.GPT(config), nanogpt.example_inputs(8)).graph)


def cluster(devices=4, nodes=1, memory_bytes=GIB):
    return Cluster(num_nodes=nodes, devices_per_node=devices, device="toy", memory_bytes=memory_bytes)


def tables(where):
    return prepare(gpt(), where, ToyCost(), REQUEST)[0]


def key(tp, microbatch, sequence):
    return TableKey(tp=tp, microbatch=microbatch, sequence=sequence)


@cache
def plan(where=None, microbatch=2, **pins):
    return solve(gpt(), where or cluster(), ToyCost(), replace(REQUEST, microbatch=microbatch, **pins), "toy")


def count(stage, axis, kind):
    return sum(c.count for c in stage.collectives if (c.axis, c.kind) == (axis, kind))


def test_a_plan_is_complete_and_legal():
    found = plan()
    verify_plan(found)
    verify_plan_for(found, gpt().graph, world_size=4)
    assert found.step.total > 0
    assert {name for name, _ in found.assumptions} >= {"dtype", "optimizer", "batch", "search", "pinned"}
    assert all(stage.memory.total <= GIB for stage in found.stages)
    assert [p.name for p in found.params] == [p.name for p in gpt().graph.params]


def test_the_step_is_slowest_stage_plus_bubble_plus_end():
    found = plan(pp=2, schedule="1f1b")
    times = [stage.forward_us + stage.backward_us for stage in found.stages]
    causes = dict(found.step)
    assert causes["bubble"] == pytest.approx(sum(times) - max(times))
    steady = found.num_microbatches * max(times)
    assert found.step.total >= steady + causes["bubble"] + causes["optimizer"]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)],
    ids=str,
)
def test_the_bubble_is_that_of_the_schedule(schedule, chunks):
    found = plan(pp=2, tp=2, dp=1, microbatch=2, schedule=schedule, chunks=chunks)
    assert (found.schedule, found.chunks, len(found.stages)) == (schedule, chunks, 2 * chunks)
    ranks = []
    for rank in range(2):
        mine = [stage for stage in found.stages if stage.rank == rank]
        parts = [(s.forward_us, s.backward_us - s.weight_us, s.weight_us) for s in mine]
        ranks.append(RankTimes(*map(sum, zip(*parts, strict=True))))
    m = found.num_microbatches
    expected = step_us(schedule, 2, chunks, m, ranks) - m * max(map(sum, ranks))
    assert dict(found.step)["bubble"] == pytest.approx(expected)


def test_same_input_same_plan():
    again = solve(gpt(), cluster(), ToyCost(), replace(REQUEST, microbatch=2), "toy")
    assert again == plan()
    assert str(again) == str(plan())


@pytest.mark.parametrize(
    "pins",
    [{"dp": 4}, {"dp": 4, "data": "replicate"}, {"tp": 4}, {"tp": 2, "pp": 2}, {"pp": 4}, {"recompute": "full"}],
    ids=str,
)
def test_never_dearer_than_a_pinned_plan(pins):
    pinned = plan(**pins)
    verify_plan_for(pinned, gpt().graph, world_size=4)
    for name, value in pins.items():
        if name in ("pp", "dp", "tp"):
            assert pinned.mesh.size(name) == value
    assert plan().step.total <= pinned.step.total * (1 + GAP)


def test_never_dearer_than_column_and_row_placements_by_hand():
    problem = tables(cluster()).problems(key(4, 4, False))[gpt().kind_names.index("block")]
    by_hand = {}
    for value in problem.values:
        if value.origin == "param":
            column = ("c_attn", "c_fc")
            place = REPLICATE
            if any(name in value.name for name in column):
                place = Shard(0, 3) if "c_attn" in value.name else Shard(0)
            elif value.name.endswith("c_proj.weight"):
                place = Shard(1)
            by_hand[value.name] = place
    assert sum(isinstance(place, Shard) for place in by_hand.values()) >= 4
    assert solve_block(problem, Prices()).objective <= solve_block(problem, Prices(), by_hand).objective + 1e-6


def test_a_tied_parameter_has_one_placement_and_is_summed_over_its_stages():
    (tied,) = gpt().shared_params
    made = tables(cluster())
    for sequence in (False, True):
        placements = {
            option.resolved.sources[tied]
            for row in made.table(key(2, 4, sequence)).options
            for option in row
            if tied in option.resolved.sources
        }
        assert len(placements) == 1
    sums = [count(stage, "tied", CollectiveKind.ALL_REDUCE) for stage in plan(pp=2, schedule="1f1b").stages]
    assert sums == [1, 1]
    sums = [count(stage, "tied", CollectiveKind.ALL_REDUCE) for stage in plan(pp=2, schedule="interleaved").stages]
    assert sums == [1, 0, 0, 1]


def test_collectives_of_plain_data_parallelism():
    found = plan(dp=4, data="replicate")
    (stage,) = found.stages
    sums = [c for c in stage.collectives if c.kind is CollectiveKind.ALL_REDUCE]
    params = sum(p.meta.num_bytes for p in gpt().graph.params)
    assert [(c.axis, c.count, c.num_bytes) for c in sums] == [("dp", len(gpt().segments) + 1, params + 4)]


def test_collectives_of_a_sharded_data_axis():
    found = plan(dp=2, tp=2, data="shard", microbatch=2)
    (stage,) = found.stages
    groups = count(stage, "dp", CollectiveKind.REDUCE_SCATTER)
    assert count(stage, "dp", CollectiveKind.ALL_GATHER) == 2 * found.num_microbatches * groups


def test_collectives_of_a_pipeline():
    for schedule, ends in (("1f1b", [1, 1]), ("interleaved", [1, 2, 2, 1])):
        found = plan(pp=2, dp=2, tp=1, schedule=schedule)
        for kind in (CollectiveKind.SEND, CollectiveKind.RECV):
            assert [count(s, "pp", kind) for s in found.stages] == [found.num_microbatches * n for n in ends]
    assert [count(s, "pp", CollectiveKind.BROADCAST) for s in plan(pp=2, dp=2, tp=1, schedule="1f1b").stages] == [1, 1]


def test_layouts_sum_to_the_collectives_of_their_stage():
    found = plan(tp=4, pp=1, dp=1)
    (stage,) = found.stages
    per_microbatch = sum(c.count for name in stage.layouts for c in found.layout(name).cost.collectives)
    on_axis = sum(c.count for c in stage.collectives if c.axis == "tp")
    placements = {p.name: p.tensor for p in found.params}
    once = sum(any(placements[name] == REPLICATE_PARTIAL_GRAD for name in names) for names in found.segment_params)
    assert on_axis - found.num_microbatches * per_microbatch in (once, once - 1)  # a tied one belongs to the first


def test_less_memory_is_never_faster_and_recomputes():
    roomy = plan(microbatch=8, where=cluster(devices=1))
    kept = dict(roomy.stages[0].memory)["activations"]
    limit = int(roomy.stages[0].memory.total - kept / 4)
    tight = plan(microbatch=8, where=cluster(devices=1, memory_bytes=limit))
    assert tight.stages[0].memory.total <= limit
    assert tight.step.total >= roomy.step.total * (1 - GAP)
    used = {tight.layout(name).recompute for name in tight.stages[0].layouts}
    assert used & {"selective", "full"}


def test_infeasible_names_the_stage_the_causes_and_a_cluster_that_works():
    where = cluster(devices=1, memory_bytes=5 * 2**20)
    with pytest.raises(InfeasibleError, match="no plan fits 1xtoy") as caught:
        solve(gpt(), where, ToyCost(), REQUEST, "toy")
    short = caught.value.shortfall
    assert short.missing_bytes > 0
    assert sum(size for _, size in short.by_cause) == pytest.approx(short.needed_bytes, abs=8)
    devices = next(way for way in short.remedies if "devices (" in way)
    enough = int(devices.split()[0])
    solve(
        gpt(),
        cluster(devices=min(8, enough), nodes=max(1, enough // 8), memory_bytes=5 * 2**20),
        ToyCost(),
        REQUEST,
        "toy",
    )


def test_infeasible_by_a_pin_says_which():
    where = cluster(devices=1, memory_bytes=15 * 2**20)
    with pytest.raises(InfeasibleError, match="instead of pinning recompute=none"):
        solve(gpt(), where, ToyCost(), replace(REQUEST, recompute="none", microbatch=8), "toy")


def test_the_time_limit_returns_the_best_so_far_and_says_so():
    found = solve(gpt(), cluster(), ToyCost(), replace(REQUEST, time_limit_s=1e-6), "toy")
    assert "time limit" in dict(found.assumptions)["search"]


def test_runners_up_are_the_best_of_other_meshes_with_reasons():
    found = plan()
    labels = [r.label.split(",")[0] for r in found.runners_up]
    assert len(set(labels)) == len(labels)
    assert all(r.reason for r in found.runners_up)
    assert all(r.step_us is None or r.step_us >= found.step.total * (1 - GAP) for r in found.runners_up)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tp": 3}, "tp=3 does not divide the 4 devices of 4xtoy; valid: 1, 2, 4"),
        ({"pp": 2, "dp": 2, "tp": 4}, "the degrees must multiply to 4"),
        ({"microbatch": 3}, "microbatch=3 does not divide the 8 samples"),
    ],
    ids=str,
)
def test_pins_that_cannot_be(pins, message):
    with pytest.raises(InputError, match=message):
        solve(gpt(), cluster(), ToyCost(), replace(REQUEST, **pins), "toy")


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tp": 8}, "4 query heads and 4 key-value heads, and tp must divide both; valid: 1, 2, 4"),
        ({"pp": 8}, "pp=8 needs as many segments, the model has 4"),
    ],
    ids=str,
)
def test_pins_that_the_model_cannot_follow(pins, message):
    with pytest.raises(InputError, match=message):
        solve(gpt(), cluster(devices=8), ToyCost(), replace(REQUEST, **pins), "toy")


def test_a_node_is_the_limit_of_the_tensor_degree():
    with pytest.raises(InputError, match="tp=4 does not fit a node of 2 devices"):
        solve(gpt(), cluster(devices=2, nodes=4), ToyCost(), replace(REQUEST, tp=4), "toy")


def test_one_device_is_the_plain_model():
    found = plan(where=cluster(devices=1), microbatch=8)
    assert found.mesh.sizes == (1, 1, 1, 1)
    assert all(not stage.collectives for stage in found.stages)
    assert all(p.tensor == REPLICATE for p in found.params)


def test_a_sweep_of_prices_never_worsens_time_when_time_is_all():
    made = tables(cluster())
    problem = made.problems(key(2, 4, True))[1]
    prices = sweep(made.cluster, made.cost, 2)
    variants = solve_variants(problem, prices, {}, set())
    assert 1 <= len(variants) <= len(prices)


def test_what_was_left_out_below_the_answer_is_at_most_so_much_faster():
    first = plan(gap=0.5)
    bounds = [other for other in first.runners_up if other.reason.startswith("left out")]
    assert bounds
    for other in bounds:
        faster = other.step_us < first.step.total
        share = abs(other.step_us / first.step.total - 1) * 100
        wanted = f"at most {share:.1f}% faster" if faster else f"at least {share:.1f}% slower"
        assert other.reason == f"left out: {wanted}, by its lower bound"
    assert any(other.step_us < first.step.total for other in bounds)
