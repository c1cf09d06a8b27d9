"""What the search can plan and the runtime of this version cannot run, said before anything starts."""

from collections.abc import Iterator

from autoplan.errors import PlanError
from autoplan.plan.plan import Plan, Precision


def cannot_run(plan: Plan) -> tuple[str, ...]:
    """What stands in the way of a run, each in words; nothing when the plan runs."""
    return tuple(_obstacles(plan))


def _obstacles(plan: Plan) -> Iterator[str]:
    if plan.schedule != "1f1b":
        yield f"schedule {plan.schedule}"
    if plan.mesh.size("cp") > 1:
        yield f"cp={plan.mesh.size('cp')}"
    if plan.expert > 1:
        yield f"ep={plan.expert}"
    if plan.data in ("zero1", "zero2"):
        yield f"data {plan.data}"
    if plan.data == "shard" and plan.shards < plan.data_ranks:
        yield f"states split over {plan.shards} of {plan.data_ranks} data ranks"
    if plan.offload:
        yield "optimizer states in host memory"
    if plan.precision != Precision():
        yield "dtypes other than the parameter's"
    order = tuple(axis for axis in plan.mesh.axes if plan.mesh.size(axis) > 1)
    if order != tuple(axis for axis in ("pp", "dp", "cp", "tp") if plan.mesh.size(axis) > 1):
        yield f"mesh axes in the order {', '.join(order)}"


def refuse_what_cannot_run(plan: Plan) -> None:
    """Raise PlanError that names everything this version cannot run, and the way out."""
    found = cannot_run(plan)
    if found:
        raise PlanError(
            f"this version plans, but cannot run yet: {'; '.join(found)}. Search again with --runnable "
            "(runnable=True in Python), which leaves such plans out"
        )
