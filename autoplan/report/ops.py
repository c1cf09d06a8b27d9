"""The ops of a plan with their prices, as text and JSON; nothing is computed here but shares."""

import dataclasses
import textwrap
from collections.abc import Sequence

from autoplan.plan.ops import OpPrice
from autoplan.plan.plan import Plan
from autoplan.plan.words import WIDTH, bytes_text, share_text, table, time_text
from autoplan.plan.writing import json_text

_EXA = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def ops_text(plan: Plan, ops: Sequence[OpPrice], most: int | None = None) -> str:
    """A table, dearest first, ``most`` rows of it; below it where the numbers come from."""
    total = sum(op.total_us for op in ops)
    shown = ops if most is None else ops[:most]
    lines = textwrap.wrap(
        f"{len(ops)} passes of ops take {time_text(total)} of compute in a step, all stages of one pipeline of "
        f"{plan.model} together. FLOPs, bytes and time are those of one microbatch on one device.", WIDTH,
    )  # fmt: skip
    header = ("op", "pass", "times", "FLOPs", "bytes", "time", "of peak", "limit", "source", "share")
    sources = list(dict.fromkeys(op.estimate.source for op in shown))
    rows = [_row(op, total, 1 + sources.index(op.estimate.source)) for op in shown]
    lines += ["", *table(header, rows, align="<<>>>>><>>")]
    if len(shown) < len(ops):
        rest = sum(op.total_us for op in ops[len(shown) :])
        lines += ["", f"  {len(ops) - len(shown)} more take {time_text(rest)} ({share_text(rest / total)}): --most 0"]
    lines += ["", "Sources"]
    for number, source in enumerate(sources, 1):
        lines += textwrap.wrap(f"{number}  {source}", WIDTH, initial_indent="  ", subsequent_indent="     ")
    return "\n".join(lines) + "\n"


def _row(op: OpPrice, total_us: float, source: int) -> tuple[str, ...]:
    return (
        f"{op.where.removeprefix('aten.')}; {op.layers}; {op.shapes or 'no operand'}",
        op.during,
        str(op.count),
        _flops_text(op.flops),
        bytes_text(op.num_bytes),
        time_text(op.estimate.time_us),
        share_text(op.estimate.efficiency),
        op.estimate.limit,
        f"[{source}]",
        share_text(op.total_us / total_us if total_us else 0.0),
    )


def _flops_text(flops: int) -> str:
    unit, size = next(((unit, size) for unit, size in _EXA if flops >= size), ("", 1.0))
    return f"{flops / size:.3g}{unit}"


def ops_json(ops: Sequence[OpPrice]) -> str:
    """The same as a list in JSON, all of them, with the time of a step."""
    return json_text([{**dataclasses.asdict(op), "total_us": op.total_us} for op in ops])
