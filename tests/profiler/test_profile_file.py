"""The cluster file: what is written is read back, and prices by it are those that were measured."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from profile_jobs import sum_then_fail

import autoplan
from autoplan.cluster import Group
from autoplan.cost import Call, Collective, Work
from autoplan.cost_models import ProfileCostModel, load_cluster, machine
from autoplan.errors import AutoplanError, InputError
from autoplan.ir import TensorMeta, Token
from autoplan.profiler.cases import groups, members
from autoplan.profiler.fit import CollectivePoints
from autoplan.profiler.ranks import run_ranks
from autoplan.profiler.write import Found, cluster_text
from autoplan.sharding import CollectiveKind

CALL = Call(
    op="aten.gelu.default", args=(Token("value", "0"),), kwargs=(("approximate", "none"),),
    operands=(TensorMeta(shape=(8, 64), dtype="float32"),), needs=(True,),
)  # fmt: skip
FOUND = Found(
    base="cpu",
    nodes=1,
    per_node=4,
    date="2026-12-01",
    how='torch 2, "quoted"',
    numbers={"compute.launch_us": 3.25, "links.node.latency_us": 1e-3},
    names={"links.node.name": "gloo"},
    machine=machine.describe(),
    collectives=(
        CollectivePoints(kind=CollectiveKind.ALL_REDUCE, ranks=2, per_node=2, num_bytes=(1000, 10**6),
                         us=(100.0, 1000.0), alone_us=(90.0, 900.0)),
        CollectivePoints(kind=CollectiveKind.SEND, ranks=2, per_node=2, num_bytes=(1000,), us=(50.0,),
                         alone_us=(50.0,)),
    ),
    ops={str(CALL): 123.4},
    left_out=("matmul 9x9x9 float32",),
)  # fmt: skip


def load(tmp_path: Path, found: Found) -> ProfileCostModel:
    file = tmp_path / "local.toml"
    file.write_text(cluster_text(found))
    cluster, profile = load_cluster(str(file))
    return ProfileCostModel(cluster=cluster, profile=profile)


def test_what_is_written_prices_as_it_was_measured(tmp_path: Path) -> None:
    cost = load(tmp_path, FOUND)
    work = Work(kind="memory", flops=1, num_bytes=1, dtype="float32", call=CALL)
    assert str(cost.cluster) == "4xcpu"
    assert cost.profile.launch_us == 3.25
    assert cost.compute_us(work) == 123.4
    assert cost.estimate(work).time_us == 123.4 and "measured 2026-12-01" in cost.estimate(work).source
    assert cost.compute_us(replace(work, call=replace(CALL, needs=()))) != 123.4
    assert cost.compute_us(replace(work, call=None)) != 123.4

    def us(kind: CollectiveKind, size: int, num_bytes: int = 1000) -> float:
        return cost.collective_us(Collective(kind=kind, num_bytes=num_bytes, group=Group(size=size, per_node=size)))

    assert us(CollectiveKind.ALL_REDUCE, 2) == 100
    assert us(CollectiveKind.ALL_REDUCE, 2, 500_500) == pytest.approx(550)
    assert us(CollectiveKind.ALL_REDUCE, 2, 10**7) == pytest.approx(9108, rel=0.01)
    assert us(CollectiveKind.ALL_REDUCE, 1) == 0 and us(CollectiveKind.ALL_REDUCE, 2, 0) == 0
    assert us(CollectiveKind.SEND, 4) == us(CollectiveKind.RECV, 2) == 50
    assert us(CollectiveKind.ALL_REDUCE, 4) not in (100, 0)


def test_the_digest_of_a_profile_knows_what_was_measured(tmp_path: Path) -> None:
    first = load(tmp_path, FOUND).profile
    second = load(tmp_path, replace(FOUND, ops={str(CALL): 123.5})).profile
    assert first.digest != second.digest


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("date = 2026-12-01\n\n[measured.machine]", 'date = "today"\n\n[measured.machine]', "measured.date"),
        ('kind = "all_reduce"', 'kind = "all_readuce"', "kind among"),
        ("us = [100.0, 1000.0]", "us = [100.0]", "one time per size"),
        ("us = [50.0]", "us = [-50.0]", "positive number"),
        ("ranks = 2", "ranks = 0", "whole numbers"),
        ("= 123.4", '= "fast"', "positive number"),
        ("[measured]", "[measured]\nspeed = 3", "must be a table of"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, before: str, after: str, words: str) -> None:
    text = cluster_text(FOUND)
    assert before in text
    file = tmp_path / "wrong.toml"
    file.write_text(text.replace(before, after, 1))
    with pytest.raises(InputError, match=words):
        load_cluster(str(file))


def test_a_profile_of_another_machine_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = torch.nn.Sequential(torch.nn.Linear(64, 64)), (torch.zeros(4, 64),)
    here = load(tmp_path, replace(FOUND, per_node=1))
    plan = autoplan.search(model, inputs, cluster=(here.cluster, here))
    assert "measured elsewhere" not in str(plan) + caplog.text
    foreign = replace(FOUND, per_node=1, machine={**FOUND.machine, "torch": "1.0"})
    there = load(tmp_path, foreign)
    plan = autoplan.search(model, inputs, cluster=(there.cluster, there))
    assert "torch was '1.0'" in dict(plan.assumptions)["note"]
    assert "measured elsewhere" in caplog.text


def test_groups_are_neighbours_or_one_of_each_node() -> None:
    assert list(groups(8, 4)) == [(2, 2), (4, 4), (8, 4), (2, 1)]
    assert list(groups(6, 6)) == [(2, 2), (3, 3), (6, 6)]
    assert list(groups(2, 1)) == [(2, 1)]
    for world, per_node in ((8, 4), (8, 2), (6, 6), (4, 1)):
        for ranks, in_node in groups(world, per_node):
            found = members(world, ranks, in_node, per_node)
            assert sorted(rank for ids in found for rank in ids) == list(range(world))
            for ids in found:
                nodes = [rank // per_node for rank in ids]
                assert len(ids) == ranks and {nodes.count(node) for node in nodes} == {in_node}


def test_ranks_talk_and_none_is_left_when_one_fails() -> None:
    before = multiprocessing.active_children()
    told: list[str] = []
    with pytest.raises(AutoplanError, match="rank 1"):
        run_ranks(2, sum_then_fail, told=told.append)
    assert told == ["3"]
    assert set(multiprocessing.active_children()) <= set(before)
