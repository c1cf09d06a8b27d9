"""``autoplan search``: flags in; words, files and exit codes out (see ``answers``)."""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass

import typer
from rich.console import Console

from autoplan.choices import Choices
from autoplan.cli import flags
from autoplan.cli.answers import exit_codes, refuse_unwritable, write_output
from autoplan.cli.progress import Progress, planning_work
from autoplan.errors import InfeasibleError, InputError
from autoplan.plan.file import plan_json
from autoplan.plan.money import Budget, bill_of, parse_budget
from autoplan.plan.outcome import Least, Outcome
from autoplan.plan.plan import Plan
from autoplan.report.bill import bill_text
from autoplan.report.comparison import Comparison, compare, comparison_json, comparison_text
from autoplan.report.least import least_text
from autoplan.trace.collection import no_collection


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What one search command was asked for, beside the choices."""

    model: str
    clusters: tuple[str, ...]
    global_batch: int | None
    seq_len: int | None
    dtype: str | None
    budgets: tuple[Budget, ...]
    """One per cluster."""
    output: str | None
    as_json: bool


def search(  # noqa: PLR0913 (one parameter per flag)
    model: flags.Model, *, cluster: flags.Clusters,
    global_batch: flags.GlobalBatch = None, seq_len: flags.SeqLen = None, dtype: flags.MainDtype = None,
    optimizer: flags.Optimizer = "adamw", grad_dtype: flags.GradDtype = None, reduce_dtype: flags.ReduceDtype = None,
    state_dtype: flags.StateDtype = None, master_dtype: flags.MasterDtype = None,
    pp: flags.Pp = None, dp: flags.Dp = None, cp: flags.Cp = None, tp: flags.Tp = None, ep: flags.Ep = None,
    microbatch: flags.Microbatch = None, recompute: flags.RecomputeFlag = None, schedule: flags.Schedule = None,
    chunks: flags.Chunks = None, data: flags.Data = None, shards: flags.Shards = None, cuts: flags.Cuts = None,
    offload: flags.Offload = False, pin: flags.Pin = None, forbid: flags.Forbid = None, keep: flags.Keep = None,
    runnable: flags.Runnable = False, gap: flags.Gap = None, top: flags.Top = None,
    time_limit: flags.TimeLimit = 60.0, min_devices: flags.MinDevices = False, tokens: flags.Tokens = None,
    price: flags.Prices = None, output: flags.Output = None, as_json: flags.AsJson = False,
) -> None:  # fmt: skip
    """Search the fastest plan that fits. What is given is pinned, the rest is searched.

    \b
    Examples:
      autoplan search examples/nanogpt.py --cluster 8xH100 -o plan.json
      autoplan search config.json --cluster 16x8xA100-80GB --global-batch 1024 --seq-len 8192 --tp 8 --top 5
      autoplan search config.json --cluster 8xH100 --global-batch 512 --min-devices
      autoplan search config.json --cluster 8xH100 --cluster 4x8xL4 --global-batch 512 --tokens 1T --price 2.5

    \b
    Exit codes: 0 found, 2 bad usage or input, 3 no plan fits, 130 interrupted before there was a plan.
    """
    with exit_codes():
        asked = _Asked(
            model=model, clusters=tuple(cluster), global_batch=global_batch, seq_len=seq_len, dtype=dtype,
            budgets=_budgets(cluster, tokens, tuple(price or ())), output=output, as_json=as_json,
        )  # fmt: skip
        choices = Choices(
            optimizer=optimizer, grad_dtype=grad_dtype, reduce_dtype=reduce_dtype, state_dtype=state_dtype,
            master_dtype=master_dtype, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, microbatch=microbatch, recompute=recompute,
            schedule=schedule, chunks=chunks, data=data, shards=shards, cuts=flags.parse_cuts(cuts), offload=offload,
            pins=pin or (), forbid=forbid or (), keep=keep or (), runnable=runnable, gap=gap, top=top,
            time_limit_s=time_limit,
        )  # fmt: skip
        if output is not None:
            refuse_unwritable(output)
        if min_devices:
            _answer_least(asked, *_least(asked, choices))
        elif len(cluster) == 1:
            _answer(asked, _plan(asked, choices))
        else:
            _answer_all(asked, _outcomes(asked, choices))


def _budgets(clusters: Sequence[str], tokens: str | None, prices: tuple[float, ...]) -> tuple[Budget, ...]:
    """One per cluster: one price is that of all."""
    if len(prices) > 1 and len(prices) != len(clusters):
        raise InputError(
            f"--price is given {len(prices)} times for {len(clusters)} clusters: give one, or one for each"
        )
    each = prices if len(prices) == len(clusters) else (prices or (None,)) * len(clusters)
    return tuple(parse_budget(tokens, price) for price in each)


def _plan(asked: _Asked, choices: Choices) -> Plan:
    with Progress(Console(stderr=True)).shown() as progress:
        progress("loading torch")
        with no_collection():
            from autoplan import planning  # loads torch, which --help and report can do without

        with redirect_stdout(sys.stderr):  # what the user's model prints must not mix with the plan
            return planning.search_source(
                asked.model, cluster=asked.clusters[0], global_batch=asked.global_batch, seq_len=asked.seq_len,
                dtype=asked.dtype, progress=progress, **choices,
            )  # fmt: skip


def _outcomes(asked: _Asked, choices: Choices) -> tuple[Outcome, ...]:
    with Progress(Console(stderr=True)).shown() as progress:
        progress("loading torch")
        with no_collection():
            from autoplan import planning  # as above

        with redirect_stdout(sys.stderr):
            return planning.search_clusters(
                asked.model, clusters=asked.clusters, global_batch=asked.global_batch, seq_len=asked.seq_len,
                dtype=asked.dtype, progress=progress, **choices,
            )  # fmt: skip


def _least(asked: _Asked, choices: Choices) -> tuple[Least, Plan]:
    if len(asked.clusters) > 1:
        raise InputError("--min-devices is for one kind of device: give --cluster once")
    with planning_work() as progress:
        with no_collection():
            from autoplan import planning  # as above

        return planning.search_least(
            asked.model, cluster=asked.clusters[0], global_batch=asked.global_batch, seq_len=asked.seq_len,
            dtype=asked.dtype, progress=progress, **choices,
        )  # fmt: skip


def _answer_least(asked: _Asked, least: Least, plan: Plan) -> None:
    """Print what was tried, then the plan as always."""
    typer.echo(least_text(least), nl=False, err=asked.as_json)
    if not asked.as_json:
        typer.echo()
    _answer(asked, plan)


def _answer(asked: _Asked, plan: Plan) -> None:
    """Print and write the plan. The plan is written first: no wrong budget shall lose it."""
    if asked.output is not None:
        write_output(asked.output, plan_json(plan))
    typer.echo(plan_json(plan) if asked.as_json else str(plan), nl=False)
    if asked.budgets[0]:
        typer.echo(f"\n{bill_text(bill_of(plan, asked.budgets[0]))}", nl=False, err=asked.as_json)
    _say_where(asked.output, "The plan", err=asked.as_json)


def _answer_all(asked: _Asked, outcomes: tuple[Outcome, ...]) -> None:
    """Print the comparison, and write the plan of the best cluster. Raises InfeasibleError when none has a plan."""
    found: Comparison = compare(outcomes, asked.budgets)
    if found.best is not None and asked.output is not None:
        plan = outcomes[found.best].plan
        assert plan is not None, "the best cluster has a plan"
        write_output(asked.output, plan_json(plan))
    typer.echo(comparison_json(found) if asked.as_json else comparison_text(found), nl=False)
    if found.best is None:
        raise InfeasibleError("no plan fits any of the clusters")
    name = f"The plan of {found.rows[found.best].cluster}, the {found.best_words},"
    _say_where(asked.output, name, err=asked.as_json)


def _say_where(output: str | None, name: str, err: bool) -> None:
    if output is None:
        typer.echo(f"\n{name} was not written: add -o plan.json to keep it.", err=True)
    else:
        typer.echo(f"\n{name} was written to {output}", err=err)
