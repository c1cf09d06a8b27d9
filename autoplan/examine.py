"""A plan that is given: its model traced again, then checked, priced elsewhere or explained. Nothing is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoplan.choices import DTYPES, choices_of
from autoplan.cluster import Cluster
from autoplan.cost_models import ProfileCostModel, load_cluster
from autoplan.errors import InputError, PlanError
from autoplan.plan.explanation import Check, Explanation
from autoplan.plan.ops import OpPrice
from autoplan.plan.plan import Plan
from autoplan.plan.rows import place_memory
from autoplan.plan.runnable import cannot_run
from autoplan.plan.verify import verify_plan, verify_plan_for
from autoplan.plan.words import time_text
from autoplan.planning import Job, Told, load_job, log, place_of
from autoplan.solver.degrees import valid_degrees
from autoplan.solver.explain import explain as explain_name
from autoplan.solver.legal import check_strategies
from autoplan.solver.ops import priced_ops
from autoplan.solver.reprice import give, reprice
from autoplan.solver.request import OPTIMIZER_STATES, OptimizerName

__all__ = ["check", "explain", "ops", "recost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a plan is looked at: the cluster, its prices, and the model as traced for it."""

    spec: str
    cluster: Cluster
    cost: ProfileCostModel
    job: Job


def recost(
    plan: Plan,
    *,
    model: str | None = None,
    clusters: Sequence[str] = (),
    global_batch: int | None = None,
    seq_len: int | None = None,
    progress: Told | None = None,
) -> tuple[Plan, ...]:
    """The plan priced anew on each cluster (default: its own), at another batch or sequence length where given.

    Its choices stay; dp follows the devices and the number of microbatches the batch. ``model`` replaces the place
    that the plan remembers. Raises InputError naming what cannot be there.
    """
    places = _places(plan, model, clusters, global_batch, seq_len, progress)
    return tuple(_recosted(plan, place) for place in places)


def _recosted(plan: Plan, place: Place) -> Plan:
    digest = place.cost.profile.digest
    found = reprice(plan, place.job.segmented, place.cluster, place.cost, place.job.request, digest)
    verify_plan(found)
    return found


def check(plan: Plan, *, model: str | None = None, cluster: str | None = None, progress: Told | None = None) -> Check:
    """Whether the plan is legal for the model (default: its own) and the cluster, fits, and runs by this version."""
    clusters = () if cluster is None else (cluster,)
    (place,) = _places(plan, model, clusters, None, None, progress)
    illegal, priced = _tried(plan, place)
    return Check(
        model=place.job.request.model,
        cluster=place.cluster,
        illegal=illegal,
        step_us=None if priced is None else priced.step.total,
        memory=() if priced is None else place_memory(priced),
        cannot_run=cannot_run(plan),
        figures="" if priced is None else _figures(plan, priced),
        degrees=valid_degrees(place.job.segmented, place.cluster),
    )


def _tried(plan: Plan, place: Place) -> tuple[tuple[str, ...], Plan | None]:
    """What is wrong, and the plan priced where nothing is."""
    sg, found = place.job.segmented, list[str]()
    if plan.mesh.num_devices != place.cluster.num_devices:
        product = " x ".join(f"{axis} {size}" for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True))
        found.append(
            f"the plan is for {plan.mesh.num_devices} devices ({product}), {place.cluster} has "
            f"{place.cluster.num_devices}: search again for it, or see autoplan recost"
        )
    tests: tuple[Callable[[], object], ...] = (
        lambda: verify_plan_for(plan, sg.graph),
        lambda: check_strategies(plan, sg),
    )
    found += [text for text in map(_refusal, tests) if text]
    if found:
        return tuple(dict.fromkeys(found)), None
    try:
        return (), _recosted(plan, place)
    except InputError as error:
        return (str(error),), None


def _refusal(test: Callable[[], object]) -> str:
    try:
        test()
    except PlanError as error:
        return str(error)
    return ""


def _figures(plan: Plan, priced: Plan) -> str:
    """Whether what the plan says about itself still holds."""
    before, after = plan.step.total, priced.step.total
    times = f"the plan says {time_text(before)} a step, today's cost model {time_text(after)}"
    if plan.cluster != priced.cluster:
        return f"of another cluster ({plan.cluster}): {times}"
    if plan.profile_digest != priced.profile_digest:
        return f"stale, the hardware profile has changed since ({plan.profile_digest}): {times}"
    if abs(after - before) > 1e-9 * max(before, after):
        return f"stale, made by version {plan.version}: {times}"
    return "those of today's cost model"


def explain(
    plan: Plan, name: str, *, model: str | None = None, time_limit_s: float = 60.0, progress: Told | None = None
) -> tuple[Explanation, ...]:
    """Why a part of the plan is as it is, and what every other choice would cost; several parts for a module.

    ``name`` is a weight or a pattern of weights, an op or a module, a choice (``tp``, ``schedule``, ...) or
    ``stage 0``. For a choice, each other value is searched, all together within about ``time_limit_s``.
    """
    (place,) = _places(plan, model, (), None, None, progress)
    sg, request = place.job.segmented, place.job.request
    given = give(plan, sg, place.cluster, place.cost, request)
    return explain_name(given, sg, request, name, time_limit_s, progress or log.info)


def ops(plan: Plan, *, model: str | None = None, progress: Told | None = None) -> tuple[OpPrice, ...]:
    """Every pass of every op with FLOPs, bytes, time, efficiency and the source of its price, dearest first.

    The model is traced again where the plan remembers it, or at ``model``. Raises InputError where neither is there.
    """
    (place,) = _places(plan, model, (), None, None, progress)
    given = give(plan, place.job.segmented, place.cluster, place.cost, place.job.request)
    return priced_ops(given, place.cost.estimate)


def _places(
    plan: Plan,
    model: str | None,
    clusters: Sequence[str],
    global_batch: int | None,
    seq_len: int | None,
    progress: Told | None,
) -> tuple[Place, ...]:
    """The clusters, and the model traced once for all of them, as it was traced for the search."""
    specs = tuple(clusters) or (_remembered(plan.origin.cluster, "cluster", "--cluster"),)
    found = [load_cluster(spec) for spec in specs]
    job = load_job(
        model or _remembered(plan.origin.model, "model", "the model"),
        [cluster for cluster, _ in found],
        global_batch or plan.batch_size,
        seq_len or plan.origin.seq_len,
        _dtype(plan),
        choices_of(plan.origin.options),
        progress or log.info,
    )
    request = replace(job.request, precision=plan.precision, optimizer=_optimizer(plan))
    return tuple(
        Place(
            spec=spec,
            cluster=cluster,
            cost=ProfileCostModel(cluster=cluster, profile=profile),
            job=replace(job, request=replace(request, origin=replace(request.origin, cluster=place_of(spec)))),
        )
        for spec, (cluster, profile) in zip(specs, found, strict=True)
    )


def _remembered(spec: str, what: str, how: str) -> str:
    if not spec:
        raise InputError(f"the plan does not say where its {what} is, since it was searched from Python: pass {how}")
    return spec


def _dtype(plan: Plan) -> str | None:
    """The dtype as ``--dtype`` takes it."""
    if plan.origin.dtype:
        return plan.origin.dtype
    return next((short for short, name in DTYPES.items() if name == plan.dtype), None)


def _optimizer(plan: Plan) -> OptimizerName:
    words = dict(plan.assumptions).get("optimizer", "").partition(",")[0]
    found = next((name for name in OPTIMIZER_STATES if name == words), None)
    if found is None:
        raise InputError(f"the plan does not say for which optimizer it is ({words!r}): search again")
    return found
