"""The plan in words, held by golden files: ``PYTHONPATH=tests python tests/plan/test_text.py`` writes them anew."""

import dataclasses
from pathlib import Path

import pytest
from plan.sample import one_device_plan, sample_plan
from plan.wide_sample import wide_plan

from autoplan.plan.plan import SCHEDULES, RunnerUp
from autoplan.plan.rows import place_ranks
from autoplan.plan.summary import SCHEDULE_WORDS, data_axis_words, not_yet_words
from autoplan.plan.words import bytes_text, count_text, gap_text, ranges_text, ranks_text, rate_text, time_text
from autoplan.sharding import REPLICATE

GOLDEN = {"two_stages.txt": sample_plan, "one_device.txt": one_device_plan, "chunks.txt": wide_plan}
FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    assert str(GOLDEN[name]()) == (FOLDER / name).read_text()


@pytest.mark.parametrize("make", GOLDEN.values(), ids=GOLDEN)
def test_nothing_is_wider_than_120_columns(make):
    plan = dataclasses.replace(
        make(),
        model="a/very/long/path/" * 12 + "model.py",
        runners_up=(RunnerUp(label="pp=1 " * 20, step_us=3e4, reason="slower " * 60),),
        assumptions=(("note", "word " * 90),),
    )
    assert max(map(len, str(plan).splitlines())) <= 120


def test_layers_that_are_held_otherwise_are_named():
    plan = sample_plan()
    params = tuple(
        dataclasses.replace(p, tensor=REPLICATE) if p.name in {"h.1.mlp.c_fc.weight", "h.2.mlp.c_fc.weight"} else p
        for p in plan.params
    )
    text = str(dataclasses.replace(plan, params=params))
    assert "h.*.mlp.c_fc.weight, layers 0, 3-5" in text
    assert "h.*.mlp.c_fc.weight, layers 1-2" in text


def proof_of(**changes):
    plan = sample_plan()
    return str(dataclasses.replace(plan, proof=dataclasses.replace(plan.proof, **changes)))


def test_the_proof_says_how_sure_it_is():
    step_us = sample_plan().step.total
    assert "answer    optimal by the cost model" in proof_of(bound_us=step_us)
    assert "answer    optimal by the cost model" in proof_of(bound_us=step_us * (1 - 1e-12))
    assert "answer    within 2.00% of the optimum" in proof_of(bound_us=step_us * 0.98)
    assert "answer    within 0.01% of the optimum" in proof_of(bound_us=step_us * (1 - 1e-6))
    assert "the time limit ended the search: best so far, within" in proof_of(status="time limit")
    assert "the search was interrupted: best so far, within" in proof_of(status="interrupted")


def test_many_reasons_are_cut_and_counted():
    text = proof_of(refusals=tuple((f"reason {i}", 20 - i) for i in range(11)))
    assert "20: reason 0" in text
    assert "13: reason 7" in text
    assert "33: for 3 other reasons" in text
    assert "reason 8" not in text


@pytest.mark.parametrize(
    ("data", "shards", "words"),
    [
        ("replicate", 1, "8 whole replicas, gradients summed once a step"),
        ("zero1", 8, "optimizer states split over 8 replicas (ZeRO-1)"),
        ("zero2", 8, "gradients and optimizer states split over 8 replicas (ZeRO-2)"),
        ("shard", 8, "parameters, gradients and optimizer states are split over 8 replicas (FSDP2)"),
        ("shard", 2, "are split over 2 of 8 data ranks, 4 copies summed once a step (hybrid FSDP2)"),
    ],
)
def test_the_data_axis_in_words(data, shards, words):
    assert words in data_axis_words(dataclasses.replace(wide_plan(), data=data, shards=shards))


def test_what_runs_has_no_warning_and_the_rest_names_all_of_it():
    assert "cannot run" not in str(sample_plan())
    assert not_yet_words(wide_plan()).startswith("This version cannot run it yet: schedule interleaved; cp=2; ep=4;")


def test_every_schedule_has_words():
    assert set(SCHEDULE_WORDS) == set(SCHEDULES)


def test_ranks_of_a_place_follow_the_order_of_the_mesh():
    assert [ranks for ranks in place_ranks(sample_plan(), 1)] == [range(4, 8)]
    plan = wide_plan()
    for place in range(2):
        ranks = [rank for run in place_ranks(plan, place) for rank in run]
        assert ranks == [r for r in range(32) if plan.mesh.coordinates(r)["pp"] == place]
    assert place_ranks(one_device_plan(), 0) == (range(1),)


def test_unknown_rates_are_left_out():
    plan = dataclasses.replace(wide_plan(), tokens=0, peak_flops_per_s=0.0)
    text = str(plan)
    assert "MFU 3" not in text
    assert "tokens/s" not in text
    assert "samples/s" in text


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (time_text(0), "0 us"),
        (time_text(0.5), "0.50 us"),
        (time_text(999.4), "999 us"),
        (time_text(999.6), "1.00 ms"),
        (time_text(12_345), "12.3 ms"),
        (time_text(3_200_000), "3.20 s"),
        (bytes_text(0), "0 B"),
        (bytes_text(1023), "1023 B"),
        (bytes_text(2**30), "1.00 GiB"),
        (bytes_text(76 * 2**30), "76.0 GiB"),
        (bytes_text(5000 * 2**40), "5000 TiB"),
        (rate_text(3336.9), "3,337"),
        (rate_text(0.031), "0.03"),
        (ranges_text([0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8"),
        (ranges_text([]), ""),
        (ranks_text([range(4), range(8, 9)]), "0-3, 8"),
        (ranks_text([range(i, i + 2) for i in range(0, 50, 10)]), "0-1, 10-11, ..., 40-41"),
        (gap_text(0.0042), "0.42%"),
        (gap_text(0.00421), "0.43%"),
        (gap_text(0.0999), "9.99%"),
        (gap_text(0.1201), "13%"),
        (count_text(2, "copy"), "2 copies"),
    ],
)
def test_digits(found, expected):
    assert found == expected


if __name__ == "__main__":
    for golden, make in GOLDEN.items():
        (FOLDER / golden).write_text(str(make()))
