"""Time and cost of a training run, against numbers worked out by hand."""

import dataclasses

import pytest
from plan.sample import one_device_plan, sample_plan

from autoplan.errors import InputError
from autoplan.plan.money import (
    Budget,
    bill_of,
    bill_pairs,
    bill_title,
    duration_text,
    formula_pairs,
    money_text,
    parse_budget,
    parse_tokens,
)
from autoplan.plan.plan import Amounts
from autoplan.report.bill import bill_text


def plan_of(step_s: float, tokens: int):
    """On the sample's 8 devices."""
    step = Amounts(by_cause=(("compute", step_s * 1e6),))
    return dataclasses.replace(sample_plan(), step=step, tokens=tokens)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("15T", 15 * 10**12), ("1.5B", 1_500_000_000), ("300m", 300_000_000), ("20K", 20_000), ("7", 7),
        ("1_000", 1000), ("1,000,000", 10**6), ("0.1K", 100), ("2.3T", 2_300_000_000_000),
    ],
)  # fmt: skip
def test_tokens_are_exact(text, tokens):
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "15 T", "-1", "0", "1e9", "1.5", "15G", "0.0001K", "nan"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(InputError, match="write it as 15T"):
        parse_tokens(text)


@pytest.mark.parametrize("price", [0, -2.5, float("nan"), float("inf")])
def test_a_price_is_above_zero(price):
    with pytest.raises(InputError, match="price must be above 0"):
        parse_budget(None, price)


def test_nothing_asked_is_no_budget():
    assert not parse_budget(None, None)
    assert parse_budget(None, 2.5)
    assert parse_budget("1K", None)


def test_hand_computed():
    """1000 tokens a step, 3.6 s a step: 10**6 tokens are 1000 steps, 3600 s, 1 hour, 8 device-hours, 20 at 2.5."""
    bill = bill_of(plan_of(3.6, 1000), Budget(tokens=10**6, price=2.5))
    assert (bill.steps, bill.num_devices) == (1000, 8)
    assert bill.hours == pytest.approx(1)
    assert bill.device_hours == pytest.approx(8)
    assert bill.cost == pytest.approx(20)
    assert bill_pairs(bill) == (("time", "1.00 hours"), ("device-hours", "8.00"), ("cost", "20.00"))
    assert formula_pairs(bill) == (
        ("steps", "tokens / tokens of a step = 1,000,000 / 1,000 = 1,000"),
        ("hours", "steps x seconds of a step / 3600 = 1,000 x 3.6 / 3600 = 1"),
        ("device-hours", "hours x devices = 1 x 8 = 8.00"),
        ("cost", "device-hours x price = 8.00 x 2.5 = 20.00"),
    )


def test_a_step_that_is_begun_counts_whole():
    assert bill_of(plan_of(1, 1000), Budget(tokens=1001)).steps == 2
    assert bill_of(plan_of(1, 1000), Budget(tokens=1000)).steps == 1
    assert bill_of(plan_of(1, 1000), Budget(tokens=1)).steps == 1


def test_a_long_run():
    """15T tokens, 16M a step of 100 s on 8 devices: 894,070 steps, 24,835.3 hours, 198,682 device-hours."""
    bill = bill_of(plan_of(100, 2**24), Budget(tokens=15 * 10**12, price=2))
    assert bill.steps == 894_070  # 894,069.67
    assert bill.hours == pytest.approx(894_070 * 100 / 3600)
    assert bill_pairs(bill) == (("time", "1,035 days"), ("device-hours", "198,682"), ("cost", "397,364"))


def test_only_tokens_or_only_a_price():
    only_tokens = bill_of(plan_of(3.6, 1000), Budget(tokens=10**6))
    assert (only_tokens.cost, only_tokens.cost_per_hour) == (None, None)
    assert [name for name, _ in formula_pairs(only_tokens)] == ["steps", "hours", "device-hours"]
    assert bill_title(only_tokens) == "Training on 1,000,000 tokens"
    only_price = bill_of(plan_of(3.6, 1000), Budget(price=2.5))
    assert (only_price.hours, only_price.cost, only_price.cost_per_hour) == (None, None, 20)
    assert bill_pairs(only_price) == (("cost of an hour", "20.00"),)
    assert formula_pairs(only_price) == (("cost of an hour", "devices x price = 8 x 2.5 = 20.00"),)


def test_samples_without_a_sequence_have_no_tokens():
    with pytest.raises(InputError, match="samples of .* have no sequence, a step is 64 samples"):
        bill_of(one_device_plan(), Budget(tokens=10**9))
    assert bill_of(one_device_plan(), Budget(price=1)).cost_per_hour == 1


def test_the_text_shows_the_formula_below_the_number():
    lines = bill_text(bill_of(plan_of(3.6, 1000), Budget(tokens=10**6, price=2.5))).splitlines()
    assert lines[0] == "Training on 1,000,000 tokens at 2.5 a device-hour"
    assert lines.index("  cost          20.00") < lines.index(
        "  cost          device-hours x price = 8.00 x 2.5 = 20.00"
    )
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (duration_text(0.01), "36.0 s"),
        (duration_text(0), "0 us"),
        (duration_text(1.5), "1.50 hours"),
        (duration_text(47.9), "47.9 hours"),
        (duration_text(48), "2.00 days"),
        (duration_text(24 * 4321), "4,321 days"),
        (money_text(999.994), "999.99"),
        (money_text(1234567.8), "1,234,568"),
    ],
)
def test_digits(found, expected):
    assert found == expected
