"""``autoplan check``: a plan file, a model and a cluster in; whether they go together out."""

from typing import Annotated

import typer

from autoplan.cli import flags
from autoplan.cli.answers import exit_codes
from autoplan.cli.progress import planning_work
from autoplan.plan.explanation import Check
from autoplan.plan.file import load_plan
from autoplan.plan.plan import Plan
from autoplan.report.explain import check_json, check_text
from autoplan.trace.collection import no_collection

NOT_GOOD = 1


def check(
    plan_file: flags.PlanFile,
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The model, as for search. Default: that of the plan.")
    ] = None,
    cluster: flags.OtherCluster = None,
    as_json: flags.AsJson = False,
) -> None:
    """Check a plan: legal for the model and the cluster, does it fit, are its figures still true, does it run.

    \b
    Examples:
      autoplan check plan.json
      autoplan check plan.json model.py --cluster 8xH100

    \b
    Exit codes: 0 legal and fits, 1 not legal or does not fit, 2 bad usage or input.
    """
    with exit_codes():
        found = _checked(load_plan(plan_file), model, cluster)
        typer.echo(check_json(found) if as_json else check_text(found), nl=False)
        if not found.good:
            raise typer.Exit(NOT_GOOD)


def _checked(plan: Plan, model: str | None, cluster: str | None) -> Check:
    with planning_work() as progress:
        with no_collection():
            from autoplan import examine  # loads torch, which --help can do without

        return examine.check(plan, model=model, cluster=cluster, progress=progress)
