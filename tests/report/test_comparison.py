"""Searches on several clusters side by side."""

import dataclasses
import json

import pytest
from plan.sample import sample_plan
from plan.wide_sample import wide_plan

from autoplan.cluster import Cluster
from autoplan.errors import InputError, Shortfall
from autoplan.plan.money import Budget
from autoplan.plan.outcome import Outcome
from autoplan.plan.plan import Amounts, Plan
from autoplan.report.comparison import compare, comparison_json, comparison_text

L4 = Cluster(num_nodes=1, devices_per_node=8, device="L4", memory_bytes=20 * 2**30)
SHORT = Outcome(
    cluster=L4,
    reason="no plan fits 8xL4; the nearest is pp=8\n  stage 0 needs ...",
    shortfall=Shortfall(
        stage=3, needed_bytes=30 * 2**30, limit_bytes=20 * 2**30, by_cause=(("activations", 30 * 2**30),),
        remedies=("16 devices (2x8xL4)",),
    ),
)  # fmt: skip
PINNED = Outcome(cluster=L4, reason="tp=16 does not fit a node of 8 devices")


def on(plan: Plan, step_us: float | None = None) -> Outcome:
    if step_us is not None:
        plan = dataclasses.replace(plan, step=Amounts(by_cause=(("compute", step_us),)))
    return Outcome(cluster=plan.cluster, plan=plan)


def no_budgets(count: int) -> tuple[Budget, ...]:
    return (Budget(),) * count


def test_the_fastest_is_best_without_prices():
    assert compare([on(sample_plan(), 20e3), on(wide_plan(), 5e3)], no_budgets(2)).best == 1
    assert compare([on(sample_plan(), 5e3), on(wide_plan(), 5e3)], no_budgets(2)).best == 0
    found = compare([SHORT, on(sample_plan())], no_budgets(2))
    assert (found.best, found.best_by, found.best_words) == (1, "step time", "fastest")


def test_the_cheapest_is_best_with_prices():
    """8 devices take 20 ms, 32 take 6 ms: 160 against 192 device-ms a step."""
    outcomes = [on(sample_plan(), 20e3), on(wide_plan(), 6e3)]
    alike = compare(outcomes, (Budget(price=2.0),) * 2)
    assert (alike.best, alike.best_by, alike.best_words) == (0, "cost", "cheapest")
    assert compare(outcomes, (Budget(price=2.0), Budget(price=1.6))).best == 1
    assert compare(outcomes, (Budget(tokens=10**9),) * 2).best_words == "fastest"


def test_nothing_fits_anywhere():
    found = compare([SHORT, PINNED], no_budgets(2))
    assert found.best is None
    assert comparison_text(found).endswith("No plan fits any of the clusters.\n")


def test_the_table():
    found = compare([on(sample_plan()), SHORT, PINNED, on(wide_plan())], no_budgets(4))
    text = comparison_text(found)
    lines = text.splitlines()
    assert lines[1].split() == ["cluster", "devices", "step", "tokens/s", "MFU", "memory", "of", "limit", "gap"]
    assert lines[3].split() == ["8xH100", "8", "19.2", "ms", "3,417,071", "46.4%", "3.38", "GiB", "4.4%", "0.42%"]
    assert lines[4].split() == ["8xL4", "8", *"------"]
    words = " ".join(text.split())
    assert "8xH100 pp=2 dp=2 tp=2, 4 microbatches of 8" in words
    assert "no plan fits: stage 3 needs 30.0 GiB of 20.0 GiB, short by 10.0 GiB, most of it activations" in words
    assert "what would make it fit: 16 devices (2x8xL4)" in words
    assert "no plan: tp=16 does not fit a node of 8 devices" in words
    assert "data zero2 over 4 (time limit: best so far)" in words
    assert text.endswith("The fastest is 8xH100.\n")
    assert max(map(len, lines)) <= 120


def test_time_and_cost_are_columns_and_the_formula_stands_below():
    budgets = (Budget(tokens=10**12, price=2.5), Budget(tokens=10**12, price=2.5), Budget(tokens=10**12, price=1.0))
    text = comparison_text(compare([on(sample_plan()), SHORT, on(wide_plan())], budgets))
    header, _, first, second, third = text.splitlines()[1:6]
    assert header.split()[-2:] == ["time", "cost"]
    assert first.split()[-3:] == ["3.39", "days", "1,626"]  # 10**12 / 65536 x 19.179 ms = 292,650 s; x 8 x 2.5 / 3600
    assert second.split()[-2:] == ["-", "-"]
    assert third.split()[-1] == "6,904"  # 776,672 s x 32 / 3600
    assert "The cheapest is 8xH100." in text
    assert "cost          device-hours x price = " in text
    assert max(map(len, text.splitlines())) <= 120


def test_tokens_that_cannot_be_counted_are_an_error():
    plan = dataclasses.replace(sample_plan(), tokens=0)
    with pytest.raises(InputError, match="have no sequence"):
        compare([on(plan)], (Budget(tokens=1),))


def test_json_has_the_figures():
    data = json.loads(comparison_json(compare([on(sample_plan()), SHORT], no_budgets(2))))
    assert (data["best"], data["best_by"]) == (0, "step time")
    assert data["rows"][0]["found"]["step_us"] == 19179.0
    assert data["rows"][1]["found"] is None
    assert data["rows"][1]["shortfall"]["needed_bytes"] == 30 * 2**30
