"""Explanations, checks and plans priced elsewhere in words."""

import dataclasses
import json

import pytest
from plan.sample import sample_plan

from autoplan.cluster import Cluster
from autoplan.plan.explanation import Alternative, Check, Explanation
from autoplan.plan.plan import Amounts
from autoplan.report.explain import (
    check_json,
    check_text,
    explanation_text,
    explanations_json,
    recost_json,
    recost_text,
)

GIB = 2**30
H100 = Cluster(num_nodes=1, devices_per_node=8, device="H100", memory_bytes=76 * GIB)
EXPLANATION = Explanation(
    subject="weight layers.*.mlp.w1.weight",
    chosen="split along dim 0 over tp 8",
    facts=(("read by", "linear, layers 0-31"),),
    step_us=10_000,
    peak_bytes=40 * GIB,
    alternatives=(
        Alternative(words="split along dim 1", step_us=10_500, peak_bytes=41 * GIB, reason="an all-reduce more"),
        Alternative(words="whole", step_us=None, peak_bytes=None, reason="stage 0 is short by 12.0 GiB"),
    ),
    changes=("With 12.0 GiB more memory it would be whole.",),
)
CHECK = Check(
    model="gpt.py",
    cluster=H100,
    illegal=(),
    step_us=19_179,
    memory=(
        Amounts(by_cause=(("parameters", 10 * GIB), ("activations", 20 * GIB))),
        Amounts(by_cause=(("parameters", 10 * GIB), ("activations", 30 * GIB))),
    ),
    cannot_run=(),
)


def test_an_explanation():
    assert explanation_text(EXPLANATION).splitlines() == [
        "weight layers.*.mlp.w1.weight",
        "  chosen   split along dim 0 over tp 8",
        "  read by  linear, layers 0-31",
        "",
        "Alternatives, all else as in the plan",
        "  choice                  step  change    memory  why not",
        "  -----------------  ---------  ------  --------  ----------------------------",
        "  as in the plan       10.0 ms          40.0 GiB",
        "  split along dim 1    10.5 ms   +5.0%  41.0 GiB  an all-reduce more",
        "  whole              cannot be                    stage 0 is short by 12.0 GiB",
        "",
        "What would change the choice",
        "  - With 12.0 GiB more memory it would be whole.",
    ]
    assert json.loads(explanations_json([EXPLANATION]))[0]["alternatives"][1]["step_us"] is None


def test_an_explanation_without_alternatives_is_short():
    text = explanation_text(dataclasses.replace(EXPLANATION, alternatives=(), changes=()))
    assert text.splitlines()[-1] == "  read by  linear, layers 0-31"


def test_a_good_plan():
    assert CHECK.good
    assert check_text(CHECK).splitlines() == [
        "Plan for gpt.py on 8xH100",
        "  legal  yes",
        "  fits   yes: stage 1 is the fullest: 40.0 GiB of 76.0 GiB (52.6%)",
        "  step   19.2 ms predicted",
        "  runs   yes",
    ]


def test_stale_figures_and_valid_degrees_stand_below():
    found = dataclasses.replace(CHECK, figures="stale", degrees=(("tp", "1, 2: 2 heads"), ("cp", "1: no sequence")))
    assert check_text(found).splitlines()[4:] == [
        "  figures  stale",
        "  runs     yes",
        "",
        "Valid degrees for this model, cluster and batch",
        "  tp  1, 2: 2 heads",
        "  cp  1: no sequence",
    ]


def test_a_plan_that_does_not_fit_says_what_for():
    small = dataclasses.replace(CHECK, cluster=dataclasses.replace(H100, memory_bytes=29 * GIB), cannot_run=("cp=2",))
    assert (small.over, small.good) == ((0, 1), False)
    assert check_text(small).splitlines()[2:] == [
        "  fits   no: stage 1 is the fullest: 40.0 GiB of 29.0 GiB (137.9%)",
        "         stage 0 is short by 1.00 GiB: activations 20.0 GiB, parameters 10.0 GiB",
        "         stage 1 is short by 11.0 GiB: activations 30.0 GiB, parameters 10.0 GiB",
        "  step   19.2 ms predicted",
        "  runs   not yet: cp=2",
    ]
    assert json.loads(check_json(small))["good"] is False


def test_an_illegal_plan_says_where():
    bad = dataclasses.replace(CHECK, illegal=("stages[1].end: expected 8", "mesh: 4 devices"), step_us=None, memory=())
    assert not bad.good
    assert check_text(bad).splitlines()[1:4] == [
        "  legal  no: stages[1].end: expected 8",
        "         mesh: 4 devices",
        "  runs   yes",
    ]


def test_a_plan_priced_elsewhere():
    plan = sample_plan()
    assert recost_text(plan, plan).endswith("\n\nNothing changes.\n")
    causes = tuple((cause, 2 * amount) for cause, amount in plan.step)
    smaller = dataclasses.replace(plan.cluster, device="L4", memory_bytes=3 * GIB)
    text = recost_text(plan, dataclasses.replace(plan, cluster=smaller, step=Amounts(by_cause=causes)))
    assert "A  as searched: 8xH100, 64 samples in 19.2 ms, 3.38 GiB of 76.0 GiB: fits\n" in text
    assert "B  priced anew: 8xL4, 64 samples in 38.4 ms, 3.38 GiB of 3.00 GiB: does not fit, short by 388 MiB\n" in text
    assert "compute           12.8 ms  25.5 ms      +100.0%" in text
    [row] = json.loads(recost_json(plan, [dataclasses.replace(plan, cluster=smaller)]))
    assert (row["fits"], row["limit_bytes"]) == (False, 3 * GIB)
    assert [entry["name"] for entry in row["differences"]] == ["cluster", "memory of a device"]


@pytest.mark.parametrize("words", ["word " * 60, "x" * 200])
def test_the_text_stays_within_120_columns(words):
    long = Alternative(words=words, step_us=1.0, peak_bytes=1, reason=words)
    found = dataclasses.replace(EXPLANATION, subject=words, chosen=words, alternatives=(long,), changes=(words,))
    assert max(map(len, explanation_text(found).splitlines())) <= 120
    assert max(map(len, check_text(dataclasses.replace(CHECK, illegal=(words,))).splitlines())) <= 120
