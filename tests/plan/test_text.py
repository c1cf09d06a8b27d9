"""The plan in words, held by golden files: ``PYTHONPATH=tests python tests/plan/test_text.py`` writes them anew."""

import dataclasses
from pathlib import Path

import pytest
from plan.sample import one_device_plan, sample_plan

from autoplan.plan.plan import RunnerUp
from autoplan.plan.words import bytes_text, ranges_text, rate_text, time_text
from autoplan.sharding import REPLICATE

GOLDEN = {"two_stages.txt": sample_plan, "one_device.txt": one_device_plan}
FOLDER = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name):
    assert str(GOLDEN[name]()) == (FOLDER / name).read_text()


def test_nothing_is_wider_than_120_columns():
    plan = dataclasses.replace(
        sample_plan(),
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
    ],
)
def test_digits(found, expected):
    assert found == expected


if __name__ == "__main__":
    for golden, make in GOLDEN.items():
        (FOLDER / golden).write_text(str(make()))
