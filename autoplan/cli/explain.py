"""``autoplan explain``: a plan file and a name in; why it is so, and what the others would cost, out."""

from typing import Annotated

import typer

from autoplan.cli import flags
from autoplan.cli.answers import exit_codes
from autoplan.cli.progress import planning_work
from autoplan.plan.explanation import Explanation
from autoplan.plan.file import load_plan
from autoplan.plan.plan import Plan
from autoplan.report.explain import explanation_text, explanations_json
from autoplan.trace.collection import no_collection


def explain(
    plan_file: flags.PlanFile,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A weight, an op, a module, a degree or a stage.")],
    model: flags.OtherModel = None,
    time_limit: flags.TimeLimit = 60.0,
    as_json: flags.AsJson = False,
) -> None:
    """Explain one part of a plan: what was chosen, what every other choice would cost, what would change it.

    A NAME is a weight or a pattern of weights, an op or a module of the model, a choice (tp, dp, pp, cp, ep, schedule,
    microbatch, data, recompute), or a stage ("stage 3"). For a choice each other value is searched.

    \b
    Examples:
      autoplan explain plan.json "layers.*.mlp.w1.weight"
      autoplan explain plan.json tp --time-limit 120
      autoplan explain plan.json "stage 3"

    \b
    Exit codes: 0 explained, 2 bad usage or input.
    """
    with exit_codes():
        found = _explained(load_plan(plan_file), name, model, time_limit)
        words = "\n".join(map(explanation_text, found))
        typer.echo(explanations_json(found) if as_json else words, nl=False)


def _explained(plan: Plan, name: str, model: str | None, time_limit_s: float) -> tuple[Explanation, ...]:
    with planning_work() as progress:
        with no_collection():
            from autoplan import examine  # loads torch, which --help can do without

        return examine.explain(plan, name, model=model, time_limit_s=time_limit_s, progress=progress)
