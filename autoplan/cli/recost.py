"""``autoplan recost``: a plan file in; what it costs at another length, batch or cluster out."""

import typer

from autoplan.cli import flags
from autoplan.cli.answers import exit_codes, refuse_unwritable, write_output
from autoplan.cli.progress import planning_work
from autoplan.errors import InputError
from autoplan.plan.file import load_plan, plan_json
from autoplan.plan.plan import Plan
from autoplan.report.explain import recost_json, recost_text
from autoplan.trace.collection import no_collection


def recost(
    plan_file: flags.PlanFile,
    seq_len: flags.SeqLen = None,
    global_batch: flags.GlobalBatch = None,
    cluster: flags.OtherClusters = None,
    model: flags.OtherModel = None,
    output: flags.Output = None,
    as_json: flags.AsJson = False,
) -> None:
    """Price a plan at another sequence length, batch or cluster, without a search: its choices stay.

    dp follows the devices, and the number of microbatches follows the batch.

    \b
    Examples:
      autoplan recost plan.json --seq-len 1024
      autoplan recost plan.json --cluster 8xH100 --cluster 8xA100-80GB --global-batch 512

    \b
    Exit codes: 0 priced, also where it does not fit, 2 bad usage or input, or what cannot be there.
    """
    with exit_codes():
        if output is not None:
            if cluster and len(cluster) > 1:
                raise InputError("-o takes one plan: give one --cluster")
            refuse_unwritable(output)
        plan = load_plan(plan_file)
        found = _recosted(plan, model, tuple(cluster or ()), global_batch, seq_len)
        if output is not None:
            write_output(output, plan_json(found[0]))
        typer.echo(recost_json(plan, found) if as_json else _text(plan, found), nl=False)
        if output is not None:
            typer.echo(f"\nThe plan was written to {output}", err=as_json)


def _text(plan: Plan, found: tuple[Plan, ...]) -> str:
    return "\n".join(recost_text(plan, after) for after in found)


def _recosted(
    plan: Plan, model: str | None, clusters: tuple[str, ...], global_batch: int | None, seq_len: int | None
) -> tuple[Plan, ...]:
    with planning_work() as progress:
        with no_collection():
            from autoplan import examine  # loads torch, which --help can do without

        return examine.recost(
            plan, model=model, clusters=clusters, global_batch=global_batch, seq_len=seq_len, progress=progress
        )
