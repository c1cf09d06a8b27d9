"""A plan and the user's price and tokens -> how long the training takes and what it costs, with the formula.

    steps         tokens / tokens of a step, rounded up
    hours         steps x seconds of a step / 3600
    device-hours  hours x devices of the cluster
    cost          device-hours x price, in the price's currency

Nothing here knows a price: the user gives it.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

from autoplan.errors import InputError
from autoplan.plan.plan import Plan
from autoplan.plan.words import rate_text, time_text

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_AMOUNT = re.compile(r"(\d+(?:[.]\d+)?)([KMBT]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a training run is counted by; each part may be missing."""

    tokens: int | None = None
    """To train on."""
    price: float | None = None
    """Of one device for one hour."""

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return self.tokens is not None or self.price is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """A training run by a plan, in figures. What depends on a missing part of the budget is None."""

    tokens: int | None
    price: float | None
    tokens_per_step: int
    step_us: float
    num_devices: int
    steps: int | None
    hours: float | None
    device_hours: float | None
    cost: float | None
    cost_per_hour: float | None
    """Of the whole cluster."""


def parse_tokens(text: str) -> int:
    """``15T``, ``1.5B``, ``300M``, ``20K`` or a plain number. Raises InputError."""
    match = _AMOUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    amount = Decimal(match[1]) * _SUFFIXES[match[2].upper()] if match else Decimal(0)
    if amount < 1 or amount != int(amount):
        raise InputError(f"tokens {text!r} is not a whole number above 0; write it as 15T, 1.5B, 300M or 20K")
    return int(amount)


def parse_budget(tokens: str | None, price: float | None) -> Budget:
    """What the flags ask for. Raises InputError."""
    if price is not None and not 0 < price < float("inf"):
        raise InputError(f"price must be above 0, found {price:g}; it is that of one device for one hour, such as 2.5")
    return Budget(tokens=None if tokens is None else parse_tokens(tokens), price=price)


def bill_of(plan: Plan, budget: Budget) -> Bill:
    """Time and cost of training by a plan. Raises InputError when tokens cannot be counted."""
    if budget.tokens is not None and not plan.tokens:
        raise InputError(
            f"tokens cannot be counted: the samples of {plan.model} have no sequence, a step is {plan.batch_size} "
            "samples; leave --tokens out"
        )
    devices, step_us = plan.cluster.num_devices, plan.step.total
    steps = None if budget.tokens is None else -(-budget.tokens // plan.tokens)
    hours = None if steps is None else steps * step_us / 3.6e9
    device_hours = None if hours is None else hours * devices
    return Bill(
        tokens=budget.tokens,
        price=budget.price,
        tokens_per_step=plan.tokens,
        step_us=step_us,
        num_devices=devices,
        steps=steps,
        hours=hours,
        device_hours=device_hours,
        cost=None if device_hours is None or budget.price is None else device_hours * budget.price,
        cost_per_hour=None if budget.price is None else devices * budget.price,
    )


def duration_text(hours: float) -> str:
    """``36.0 s``, ``12.5 hours``, ``41.7 days``: at most three digits."""
    if hours < 1:
        return time_text(hours * 3.6e9)
    return f"{rate_text(hours)} hours" if hours < 48 else f"{rate_text(hours / 24)} days"  # noqa: PLR2004


def money_text(amount: float) -> str:
    """``1,234,567``, ``12.34``."""
    return f"{amount:,.0f}" if amount >= 1000 else f"{amount:,.2f}"  # noqa: PLR2004


def bill_pairs(bill: Bill) -> tuple[tuple[str, str], ...]:
    """The figures, name and words."""
    pairs = []
    if bill.hours is not None and bill.device_hours is not None:
        pairs += [("time", duration_text(bill.hours)), ("device-hours", money_text(bill.device_hours))]
    if bill.cost is not None:
        pairs.append(("cost", money_text(bill.cost)))
    elif bill.cost_per_hour is not None:
        pairs.append(("cost of an hour", money_text(bill.cost_per_hour)))
    return tuple(pairs)


def formula_pairs(bill: Bill) -> tuple[tuple[str, str], ...]:
    """How the figures come about: name, and formula with its inputs."""
    pairs = []
    if bill.tokens is not None and bill.steps is not None and bill.hours is not None and bill.device_hours is not None:
        seconds, hours, device_hours = bill.step_us / 1e6, f"{bill.hours:,.4g}", money_text(bill.device_hours)
        pairs += [
            ("steps", f"tokens / tokens of a step = {bill.tokens:,} / {bill.tokens_per_step:,} = {bill.steps:,}"),
            ("hours", f"steps x seconds of a step / 3600 = {bill.steps:,} x {seconds:.6g} / 3600 = {hours}"),
            ("device-hours", f"hours x devices = {hours} x {bill.num_devices:,} = {device_hours}"),
        ]
        if bill.cost is not None:
            pairs.append(("cost", f"device-hours x price = {device_hours} x {bill.price:g} = {money_text(bill.cost)}"))
    elif bill.cost_per_hour is not None:
        cost = money_text(bill.cost_per_hour)
        pairs.append(("cost of an hour", f"devices x price = {bill.num_devices:,} x {bill.price:g} = {cost}"))
    return tuple(pairs)


def bill_title(bill: Bill) -> str:
    """``Training on 15,000,000,000,000 tokens at 2.5 a device-hour``."""
    on = "" if bill.tokens is None else f" on {bill.tokens:,} tokens"
    return f"Training{on}" + ("" if bill.price is None else f" at {bill.price:g} a device-hour")


BILL_NOTE = "By the predicted step alone: no restarts, checkpoints, evaluation or start-up."
