"""The differences of two plans as text and JSON."""

import dataclasses
import json

import pytest
from plan.sample import one_device_plan, sample_plan
from plan.wide_sample import wide_plan

from autoplan.plan.plan import Amounts
from autoplan.report.difference import diff_json, diff_text

NAMES = ("a.json", "b.json")


def slower(factor: float):
    plan = sample_plan()
    causes = tuple((cause, factor * amount) for cause, amount in plan.step)
    return dataclasses.replace(plan, step=Amounts(by_cause=causes))


def test_alike():
    text = diff_text(sample_plan(), sample_plan(), NAMES)
    assert text.endswith("\nThe plans are alike.\n")
    assert text.startswith("A  a.json: examples/gpt.py:build_model on 8xH100, 64 samples in 19.2 ms\nB  b.json: ")
    assert json.loads(diff_json(sample_plan(), sample_plan())) == {
        "alike": True, "different_jobs": [], "differences": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("right", "words"),
    [
        (slower(1.25), "The same job: B is predicted to take 25.0% more time than A."),
        (slower(0.5), "The same job: B is predicted to take 50.0% less time than A."),
        (dataclasses.replace(sample_plan(), offload=True), "The same job, predicted to take the same time."),
        (wide_plan(), "Not the same job: another cluster. Times and memory below are of different work."),
        (
            dataclasses.replace(one_device_plan(), batch_size=1, graph_digest="other"),
            "Not the same job: another model and another cluster and another batch.",
        ),
    ],
)
def test_what_the_two_are_for_comes_first(right, words):
    assert diff_text(sample_plan(), right, NAMES).splitlines()[3].startswith(words)


def test_the_text_stays_within_120_columns():
    for left, right in ((sample_plan(), wide_plan()), (wide_plan(), one_device_plan())):
        assert max(map(len, diff_text(left, right, NAMES).splitlines())) <= 120


def test_a_long_section_is_cut_and_counted():
    plan = sample_plan()
    left, right = (
        dataclasses.replace(plan, assumptions=tuple((f"fact {i}", value) for i in range(30))) for value in "ab"
    )
    text = diff_text(left, right, NAMES)
    assert "fact 23" in text
    assert "fact 24" not in text
    assert "and 6 more: --json has all of them" in text
    assert len(json.loads(diff_json(left, right))["differences"]) == 30
