"""A given plan is priced as it was searched, to the last digit; elsewhere it follows, or is refused with the reason."""

import sys
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import zoo
from toy_cost import ToyCost

from autoplan.cluster import Cluster
from autoplan.errors import InputError, PlanError
from autoplan.plan.plan import Plan
from autoplan.plan.text import plan_text
from autoplan.plan.verify import verify_plan
from autoplan.sharding import REPLICATE, REPLICATE_PARTIAL_GRAD, Shard
from autoplan.solver.reprice import reprice
from autoplan.solver.request import Request
from autoplan.solver.solve import solve
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import llama  # noqa: E402  the examples are no package

GIB = 2**30
REQUEST = Request(model="m", dtype="float32", time_limit_s=20.0)


@cache
def traced(name: str, batch: int = 8, seq_len: int = 64):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "llama":
            config = llama.Config(block_size=seq_len, num_layers=4)
            tokens = torch.zeros(batch, seq_len, dtype=torch.long)
            return segment_graph(trace_model(llama.Llama(config), {"idx": tokens, "targets": tokens}).graph)
        entry = zoo.ZOO[name]
        return segment_graph(trace_model(entry.build(), entry.batch(batch, 0)).graph)


def cluster(devices: int = 4, nodes: int = 1, memory_bytes: int = GIB) -> Cluster:
    return Cluster(num_nodes=nodes, devices_per_node=devices, device="toy", memory_bytes=memory_bytes)


@cache
def searched(name: str, where: Cluster, **pins: object) -> Plan:
    return solve(traced(name), where, ToyCost(), replace(REQUEST, **pins), "toy")


def again(plan: Plan, name: str = "llama", where: Cluster | None = None, batch: int = 8, seq_len: int = 64) -> Plan:
    return reprice(plan, traced(name, batch, seq_len), where or plan.cluster, ToyCost(), REQUEST, "toy")


def bare(plan: Plan) -> Plan:
    """Without what a search alone knows."""
    return replace(plan, proof=again_proof(), runners_up=(), choices=(), assumptions=())


@cache
def again_proof():
    return again(searched("llama", cluster())).proof


PINS = (
    {},
    {"tp": 2, "dp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 4, "microbatch": 1},
    {"pp": 2, "schedule": "interleaved", "chunks": 2},
    {"pp": 2, "schedule": "zero-bubble", "microbatch": 1},
    {"pp": 2, "schedule": "zbv", "microbatch": 1, "dp": 1},
    {"dp": 4, "data": "shard"},
    {"dp": 4, "data": "zero2"},
    {"dp": 4, "data": "shard", "shards": 2},
    {"dp": 2, "tp": 2, "data": "zero1", "recompute": "full"},
    {"cp": 2, "tp": 2},
    {"cp": 2, "dp": 2, "data": "shard"},
    {"pins": ("layers.0.attention.wq.weight=tp:Shard(0)",), "tp": 2},
)


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_a_plan_on_its_own_model_cluster_and_batch_gets_its_own_figures(pins):
    plan = searched("llama", cluster(), **pins)
    found = again(plan)
    assert bare(found) == bare(plan)
    assert found.proof.status == "priced"


@pytest.mark.parametrize("pins", [{"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "data": "shard", "dp": 4}], ids=str)
def test_so_does_a_plan_of_experts(pins):
    plan = searched("hf-mixtral", cluster(), **pins)
    assert bare(again(plan, "hf-mixtral")) == bare(plan)


def test_figures_come_from_the_plan_and_not_from_a_search():
    """A plan whose weights were moved by hand is priced as edited: the mutation that a search would undo."""
    plan = searched("llama", cluster(), tp=2, pp=2)
    split = [p.name for p in plan.params if isinstance(p.tensor, Shard)]
    assert split
    whole = [replace(p, tensor=REPLICATE if p.name in split[:1] else p.tensor) for p in plan.params]
    edited = replace(plan, params=tuple(whole))
    found = again(edited)
    assert found.param(split[0]).tensor in (REPLICATE, REPLICATE_PARTIAL_GRAD)
    after, before = (sum(dict(stage.memory)["parameters"] for stage in each.stages) for each in (found, plan))
    assert after > before
    names = [layout.name for layout in found.layouts]
    assert len(set(names)) == len(names)
    verify_plan(found)


def test_the_data_degree_follows_the_devices_and_microbatches_the_batch():
    plan = searched("llama", cluster(), tp=2, dp=2, data="shard", microbatch=2)
    found = again(plan, where=cluster(nodes=2))
    assert (found.mesh.size("dp"), found.mesh.size("tp"), found.num_microbatches, found.shards) == (4, 2, 1, 4)
    told = [text for name, text in found.assumptions if name == "note"]
    assert "priced elsewhere: dp: 4 instead of 2" in told
    verify_plan(found)
    assert again(plan, batch=16).num_microbatches == 4
    assert again(plan, batch=16).step.total > plan.step.total


def test_a_longer_sequence_takes_longer_and_more_memory():
    plan = searched("llama", cluster(), tp=2, pp=2)
    found = again(plan, seq_len=128)
    assert found.tokens == 2 * plan.tokens
    assert found.step.total > plan.step.total
    assert all(b.memory.total > a.memory.total for a, b in zip(plan.stages, found.stages, strict=True))
    assert [s.layouts for s in found.stages] == [s.layouts for s in plan.stages]
    verify_plan(found)


@pytest.mark.parametrize(
    ("pins", "elsewhere", "message"),
    [
        ({"tp": 2, "dp": 2}, {"where": cluster(devices=1, nodes=4)}, "tp=2, which stays inside a node.*has 1 devices"),
        ({"pp": 2, "tp": 2}, {"where": cluster(devices=6)}, "needs a multiple of 4 devices .pp=2 x tp=2; dp follows"),
        ({"dp": 4, "data": "shard", "shards": 2}, {"where": cluster(devices=3)}, "2 does not divide the 3"),
        ({"dp": 4, "microbatch": 2}, {"batch": 12}, "a global batch of 12 does not divide .*a multiple of 8"),
        ({"pp": 4, "microbatch": 2}, {"batch": 4}, "pp=4 is filled by at least 4 microbatches"),
        ({"tp": 2, "dp": 2}, {"seq_len": 63}, "crosses between layers as Shard.1.|cannot run as"),
        ({"cp": 2}, {"seq_len": 63}, "over 2 ranks of the context axis|does not split"),
    ],
    ids=str,
)
def test_what_cannot_be_there_is_named(pins, elsewhere, message):
    plan = searched("llama", cluster(), **pins)
    with pytest.raises(InputError, match=message):
        again(plan, **elsewhere)


def test_another_model_is_refused():
    with pytest.raises(PlanError, match="whose chain of segments is not this model's"):
        again(searched("llama", cluster()), "nanogpt")


def test_the_report_says_that_nothing_was_searched():
    text = plan_text(again(searched("llama", cluster())))
    assert "priced as given, not searched" in text
    assert "optimal" not in text


def test_the_split_of_the_sequence_is_the_plan_s_own():
    plan = searched("llama", cluster(), cp=2, tp=2)
    first, *rest = plan.layouts
    op = next(op for op in first.ops if op.context is not None and len(op.context.inputs) == 2)
    odd = replace(op.context, inputs=(Shard(7), Shard(7)))
    ops = tuple(replace(each, context=odd) if each is op else each for each in first.ops)
    edited = replace(plan, layouts=(replace(first, ops=ops), *rest))
    with pytest.raises(InputError, match=r"cannot run as Shard\(7\), Shard\(7\) .* of the context axis"):
        again(edited)
