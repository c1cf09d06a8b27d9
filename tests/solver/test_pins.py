"""Pins that cannot be, each refused by a message with the reason and what is valid; those that can be are not."""

from dataclasses import replace
from functools import cache

import llama
import pytest

from autoplan.cluster import Cluster
from autoplan.errors import InputError
from autoplan.solver.batch import split_batch
from autoplan.solver.pins import check_pins, tensor_degrees
from autoplan.solver.request import Request
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

REQUEST = Request(model="llama", dtype="float32")
BATCH = 16


@cache
def sg():
    """Six segments: embed, four blocks, head; four query heads, two key-value heads."""
    return segment_graph(trace_model(llama.Llama(llama.Config(width=64, hidden=96)), llama.example_inputs(BATCH)).graph)


def check(devices=8, nodes=1, context=(1, 2, 4), experts=0, **pins):
    cluster = Cluster(num_nodes=nodes, devices_per_node=devices // nodes, device="toy", memory_bytes=2**30)
    request = replace(REQUEST, **pins)
    check_pins(sg(), split_batch(sg()), cluster, request, context_degrees=context, num_experts=experts)


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"pp": 2, "dp": 2, "cp": 2, "tp": 1},
        {"pp": 2, "dp": 2, "tp": 1},  # cp=2 is left
        {"cp": 4, "tp": 2},
        {"ep": 4, "experts": 8, "dp": 2, "cp": 2},
        {"ep": 1},
        {"shards": 2, "dp": 4, "data": "zero2"},
        {"shards": 1, "data": "replicate"},
        {"schedule": "zbv", "pp": 2, "chunks": 2},
        {"schedule": "interleaved", "pp": 2, "chunks": 3},
        {"schedule": "zero-bubble", "chunks": 1},
        {"schedule": "1f1b", "pp": 1},
        {"cuts": (), "pp": 1},
        {"cuts": (1, 2, 5), "pp": 4},
        {"cuts": (1, 2, 5), "pp": 2, "chunks": 2},
        {"cuts": (1, 2, 5), "schedule": "zbv"},
        {"cuts": (1, 2, 3, 4, 5)},  # pp=2, chunks=3
        {"pp": 4, "dp": 2, "microbatch": 2},
    ],
    ids=str,
)
def test_pins_that_can_be(pins):
    check(**pins)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"cp": 3}, "cp=3 does not divide the 8 devices of 8xtoy; valid: 1, 2, 4, 8"),
        ({"cp": 8}, "cp=8 does not split the sequence of this model; valid: 1, 2, 4"),
        ({"cp": 2, "context": (1,)}, "cp=2 does not split the sequence of this model; valid: 1"),
        ({"pp": 2, "dp": 2, "cp": 2, "tp": 2},
         "pp=2 x dp=2 x cp=2 x tp=2 makes 16, but 8xtoy has 8 devices; the degrees must multiply to 8"),
        ({"pp": 1, "dp": 2, "cp": 2, "tp": 1}, "pp=1 x dp=2 x cp=2 x tp=1 makes 4, but 8xtoy has 8 devices"),
        ({"pp": 1, "dp": 2, "tp": 2, "context": (1,)}, "pp=1 x dp=2 x tp=2 makes 4, but 8xtoy has 8 devices"),
        ({"pp": 1, "dp": 1, "tp": 1}, "pp=1 x dp=1 x tp=1 leaves cp=8 on the 8 devices of 8xtoy, which does not split"),
        ({"tp": 8, "nodes": 2}, "tp=8 does not fit a node of 4 devices"),
        ({"tp": 4}, "4 query heads and 2 key-value heads, and tp must divide both; valid: 1, 2"),
    ],
    ids=str,
)  # fmt: skip
def test_degrees(pins, message):
    refused(pins, message)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"ep": 2}, "ep=2 needs a mixture of experts, and this model has none; leave ep out"),
        ({"ep": 4, "experts": 6}, "ep=4 does not divide the 6 experts; valid: 1, 2, 3, 6"),
        ({"ep": 8, "experts": 8, "dp": 2, "cp": 2},
         "ep=8 does not divide the data ranks (dp x cp), of which there can be 4 with dp=2 x cp=2; valid: 1, 2, 4"),
        ({"ep": 8, "experts": 8, "pp": 2, "tp": 1}, "of which there can be 4 with pp=2 x tp=1; valid: 1, 2, 4"),
        ({"ep": 8, "experts": 8, "dp": 1}, "of which there can be 1, 2, 4 with dp=1; valid: 1, 2, 4"),
        ({"shards": 3}, "shards=3 does not divide the data ranks (dp x cp), of which there can be 1, 2, 4, 8; valid: "),
        ({"shards": 4, "dp": 2, "cp": 1}, "of which there can be 2 with dp=2 x cp=1; valid: 1, 2"),
        ({"shards": 2, "data": "replicate"}, "shards=2 splits states over data ranks, and data=replicate splits none"),
        ({"shards": 1, "data": "zero1"}, "shards=1 splits no states, and data=zero1 does"),
        ({"shards": 1, "data": "shard"}, "shards=1 splits no states, and data=shard does"),
    ],
    ids=str,
)  # fmt: skip
def test_data_ranks(pins, message):
    refused(pins, message)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"schedule": "interleaved", "pp": 1}, "schedule=interleaved needs a pipeline, but pp=1 is pinned"),
        ({"schedule": "zbv", "dp": 8},
         "schedule=zbv needs a pipeline, but the other pinned degrees leave pp=1 on 8xtoy"),
        ({"chunks": 2, "pp": 1}, "chunks=2 are stages per rank of a pipeline, but pp=1 is pinned"),
        ({"chunks": 2, "schedule": "1f1b"},
         "schedule=1f1b cannot have chunks=2: it runs one stage per rank, found 2; valid chunks: 1"),
        ({"chunks": 1, "schedule": "interleaved"}, "cannot have chunks=1: it needs several stages .* 2 or more"),
        ({"chunks": 3, "schedule": "zbv"}, "zbv cannot have chunks=3: it runs two stages per rank, .* chunks: 2"),
        ({"pp": 8}, "pp=8 needs as many segments, the model has 6; use at most that"),
        ({"pp": 4, "chunks": 2}, "pp=4 with chunks=2 needs 8 segments, 2 for each rank, and the model has 6"),
        ({"pp": 4, "schedule": "zbv"}, "pp=4 with schedule=zbv needs 8 segments, 2 for each rank"),
        ({"chunks": 4}, "pp=2 with chunks=4 needs 8 segments"),
        ({"pp": 4, "microbatch": 8}, "pp=4 needs at least as many microbatches, but a batch of 16 over dp=1"),
        ({"pp": 2, "microbatch": 8, "schedule": "zbv"}, "pp=2 needs 3 microbatches with schedule=zbv"),
        ({"pp": 3, "devices": 3, "dp": 1, "microbatch": 1, "schedule": "interleaved"},
         "schedule=interleaved cannot run pp=3: 16 microbatches do not make 5 equal rounds"),
    ],
    ids=str,
)  # fmt: skip
def test_schedules(pins, message):
    refused(pins, message)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"cuts": (2, 6)}, "cuts=2, 6 do not all lie inside the chain: .* from 1 to 5"),
        ({"cuts": (0, 2)}, "cuts=0, 2 do not all lie inside the chain"),
        ({"cuts": (3, 2)},
         "cuts=3, 2 must ascend, each position once. The model has 6 segments: 0 embed, 1-4 block, 5 head"),
        ({"cuts": (3, 3)}, "cuts=3, 3 must ascend, each position once"),
        ({"cuts": (1, 3)}, "cuts=1, 3 make 3 stages, but 8xtoy can have 1, 2, 4, 6: give one cut fewer than stages"),
        ({"cuts": (1, 3), "pp": 2}, "make 3 stages, but 8xtoy with pp=2 can have 2, 4, 6"),
        ({"cuts": (1,), "pp": 4}, "make 2 stages, but 8xtoy with pp=4 can have 4: give one cut fewer than stages"),
        ({"cuts": (), "pp": 2}, "cuts=none make 1 stage, but 8xtoy with pp=2 can have 2, 4, 6"),
        ({"cuts": (1, 3, 4), "schedule": "1f1b", "tp": 2, "dp": 2}, "make 4 stages, but 8xtoy with dp=2 and tp=2 and "),
        ({"cuts": (1,), "chunks": 2}, "make 2 stages, but 8xtoy with chunks=2 can have 4"),
    ],
    ids=str,
)  # fmt: skip
def test_cuts(pins, message):
    refused(pins, message)


def refused(pins, message):
    with pytest.raises(InputError) as caught:
        check(**pins)
    for part in message.split(" .* "):
        assert part in str(caught.value), str(caught.value)


def test_tensor_degrees_stay_in_a_node_and_split_no_head():
    cluster = Cluster(num_nodes=2, devices_per_node=4, device="toy", memory_bytes=2**30)
    assert tensor_degrees(sg(), cluster) == (1, 2)
