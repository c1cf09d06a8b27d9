"""Model in, plan out: the planning half of the public calls, which loads nothing of the runtime."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor, nn

from autoplan.choices import Choices, dtype_name, request_of
from autoplan.cluster import Cluster
from autoplan.cost_models import Profile, ProfileCostModel, load_cluster, machine
from autoplan.errors import InfeasibleError, InputError, RuleError
from autoplan.ir import SegmentedGraph
from autoplan.plan.outcome import Least, Outcome
from autoplan.plan.plan import Origin, Plan
from autoplan.plan.verify import verify_plan
from autoplan.randomness import random_ops
from autoplan.solver.devices import least_devices
from autoplan.solver.request import Request
from autoplan.solver.solve import solve
from autoplan.trace.capture import Traced, trace_model
from autoplan.trace.collection import no_collection
from autoplan.trace.inputs import Inputs, as_call, find_batch_dims
from autoplan.trace.segments import segment_graph
from autoplan.trace.source import load_model
from autoplan.trace.tree import flatten, unflatten

__all__ = ["search", "search_clusters", "search_least", "search_source"]

log = logging.getLogger(__name__)

ExampleInputs = Inputs | Callable[[int], Inputs]
Told = Callable[[str], None]
SAMPLES_PER_DEVICE = 8
"""Global batch of a search that is given none."""
_INTERRUPTED = "not searched: the search before it was interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A traced model with what was asked for, wherever it will run."""

    segmented: SegmentedGraph
    request: Request


def search(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    cluster: str | tuple[Cluster, ProfileCostModel] = "local",
    global_batch: int | None = None,
    dtype: str | None = None,
    progress: Told | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Search a plan for training ``model`` on ``cluster`` (``8xH100``, ``16x8xA100-80GB``, ``local``, a TOML file).

    ``example_inputs`` is a dict or tuple as the model takes it, or a function from the batch size to one; only shapes
    matter, and dim 0 counts samples. ``global_batch`` is the number of samples of a step (default: that of the
    example). ``dtype`` is bf16, fp32 or fp64 (default: the model's). The other keywords pin choices and set limits:
    see ``Choices``. Raises InputError for what cannot be used, InfeasibleError when nothing fits.
    """
    inputs, dims, batch = _at_batch(example_inputs, global_batch)
    kind = None if dtype is None else dtype_name(dtype)
    told = progress or log.info
    found, cost = _resolve(cluster)
    base = Request(
        model=type(model).__name__,
        dtype=kind or _model_dtype(model),
        origin=Origin(cluster=place_of(cluster) if isinstance(cluster, str) else str(found), dtype=dtype or ""),
        assumptions=(("global batch", str(batch)),),
    )
    request = request_of(base, choices)
    told("tracing the model")
    traced = trace_model(model, inputs, batch_dims=dims, dtype=kind)
    return _solve(_job(traced, request, told), found, cost, told)


def search_source(
    spec: str,
    *,
    cluster: str,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    progress: Told | None = None,
    **choices: Unpack[Choices],
) -> Plan:
    """Search a plan for a model file (``model.py``, ``model.py:factory``) or a Hugging Face ``config.json``.

    Like ``search``; ``seq_len`` sets the sequence length where the model file lets it be set, ``dtype`` defaults to
    bf16 on GPUs and fp32 on CPUs, ``global_batch`` to 8 samples per device. No weights are allocated.
    """
    told = progress or log.info
    found, profile = load_cluster(cluster)
    job = load_job(spec, (found,), global_batch, seq_len, dtype, choices, told)
    return _solve(_on(job, cluster), found, ProfileCostModel(cluster=found, profile=profile), told)


def search_clusters(
    spec: str,
    *,
    clusters: Sequence[str],
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    progress: Told | None = None,
    **choices: Unpack[Choices],
) -> tuple[Outcome, ...]:
    """``search_source`` on each of several clusters, in their order; the model is traced once.

    All have the same job: ``global_batch`` defaults to 8 samples per device of the largest cluster. Where nothing
    fits, or where a pin cannot be, the outcome has the reason; InputError is raised when that is so on every cluster.
    """
    told = progress or log.info
    found = [load_cluster(cluster) for cluster in clusters]
    job = load_job(spec, [cluster for cluster, _ in found], global_batch, seq_len, dtype, choices, told)
    return tuple(_outcomes(job, clusters, found, told))


def search_least(
    spec: str,
    *,
    cluster: str,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    progress: Told | None = None,
    **choices: Unpack[Choices],
) -> tuple[Least, Plan]:
    """The fewest devices of this kind, in nodes of this size, on which the job fits, and the best plan there.

    As ``search_source``; how many devices ``cluster`` has only says what ``global_batch`` is by default. Pins are kept
    but for ``dp``. Raises InfeasibleError when no number of devices is enough.
    """
    told = progress or log.info
    found, profile = load_cluster(cluster)
    job = load_job(spec, (found,), global_batch, seq_len, dtype, choices, told)
    cost = ProfileCostModel(cluster=found, profile=profile)
    least = least_devices(job.segmented, found, cost, job.request, told)
    request = replace(job.request, dp=None)
    cost = ProfileCostModel(cluster=least.cluster, profile=profile)
    where = cluster if os.path.isfile(cluster) else str(least.cluster)
    return least, _solve(_on(replace(job, request=request), where), least.cluster, cost, told)


def _outcomes(
    job: Job, specs: Sequence[str], found: Sequence[tuple[Cluster, Profile]], told: Told
) -> Iterator[Outcome]:
    refused: list[InputError] = []
    interrupted = False
    for spec, (cluster, profile) in zip(specs, found, strict=True):
        if interrupted:
            yield Outcome(cluster=cluster, reason=_INTERRUPTED)
            continue
        cost = ProfileCostModel(cluster=cluster, profile=profile)
        try:
            plan = _solve(_on(job, spec), cluster, cost, _naming(cluster, told))
        except InfeasibleError as error:
            yield Outcome(cluster=cluster, reason=str(error), shortfall=error.shortfall)
        except RuleError:
            raise
        except InputError as error:
            refused.append(error)
            if len(refused) == len(specs):
                raise
            yield Outcome(cluster=cluster, reason=str(error))
        else:
            interrupted = plan.proof.status == "interrupted"
            yield Outcome(cluster=cluster, plan=plan)


def _naming(cluster: Cluster, told: Told) -> Told:
    """Say for which cluster it is."""
    return lambda message: told(f"{cluster}: {message}")


@no_collection()
def load_job(
    spec: str,
    clusters: Sequence[Cluster],
    global_batch: int | None,
    seq_len: int | None,
    dtype: str | None,
    choices: Choices,
    told: Told,
) -> Job:
    """Build and trace what a file names."""
    most = max(cluster.num_devices for cluster in clusters)
    batch = global_batch or SAMPLES_PER_DEVICE * most
    default = "" if global_batch else f" (default: {SAMPLES_PER_DEVICE} per device)"
    short = dtype or _default_dtype(clusters)
    source = load_model(spec, seq_len=seq_len)
    base = Request(
        model=source.name,
        dtype=dtype_name(short),
        origin=Origin(model=place_of(spec), seq_len=seq_len, dtype=short),
        assumptions=(
            ("global batch", f"{batch}{default}"),
            *(("sequence length", str(seq_len)) for _ in range(seq_len is not None)),
            *(("note", note) for note in source.notes),
        ),
    )
    request = request_of(base, choices)
    told(f"building and tracing {source.name}")
    inputs = source.example_inputs(batch)
    dims = find_batch_dims(source.example_inputs, batch)
    traced = trace_model(source.build(), inputs, batch_dims=dims, dtype=request.dtype)
    return _job(traced, request, told)


def _default_dtype(clusters: Sequence[Cluster]) -> str:
    kinds = {"fp32" if cluster.device == "cpu" else "bf16" for cluster in clusters}
    if len(kinds) > 1:
        raise InputError("clusters of CPUs and of GPUs have different default dtypes: choose one with --dtype")
    return kinds.pop()


def _job(traced: Traced, request: Request, told: Told) -> Job:
    told(f"finding repeated blocks in {len(traced.graph.nodes)} ops")
    notes = [*traced.notes]
    if random_ops(traced.graph):
        notes.append("the model drops out; a training run by this plan is refused until dropout is 0 in its "
                     "configuration")  # fmt: skip
    assumptions = (*request.assumptions, *(("note", note) for note in notes))
    return Job(segmented=segment_graph(traced.graph), request=replace(request, assumptions=assumptions))


def _on(job: Job, cluster: str) -> Job:
    """The job, told for which cluster."""
    origin = replace(job.request.origin, cluster=place_of(cluster))
    return replace(job, request=replace(job.request, origin=origin))


def place_of(spec: str) -> str:
    """A spec that names a file with the file's full path; another one as it is."""
    if os.path.isfile(spec):
        return os.path.abspath(spec)
    file, colon, rest = spec.partition(":")
    return f"{os.path.abspath(file)}{colon}{rest}" if os.path.isfile(file) else spec


@no_collection()
def _solve(job: Job, cluster: Cluster, cost: ProfileCostModel, told: Told) -> Plan:
    notes = _foreign(cost.profile)
    request = replace(job.request, assumptions=(*job.request.assumptions, *(("note", note) for note in notes)))
    plan = solve(job.segmented, cluster, cost, request, profile_digest=cost.profile.digest, progress=told)
    verify_plan(plan)
    return plan


def _foreign(profile: Profile) -> tuple[str, ...]:
    """What a plan must say when its times were measured on another machine than this, or with another torch."""
    measured = profile.measured
    found = machine.differences(dict(measured.machine)) if measured.machine else ()
    if not found:
        return ()
    note = f"the profile was measured elsewhere on {measured.date} ({'; '.join(found)}): if you mean to run here, " \
           "measure again with autoplan profile"  # fmt: skip
    log.warning("%s", note)
    return (note,)


def _resolve(cluster: str | tuple[Cluster, ProfileCostModel]) -> tuple[Cluster, ProfileCostModel]:
    if not isinstance(cluster, str):
        return cluster
    found, profile = load_cluster(cluster)
    return found, ProfileCostModel(cluster=found, profile=profile)


def _at_batch(example: ExampleInputs, batch: int | None) -> tuple[Inputs, Sequence[int | None] | None, int]:
    """Inputs at the wanted batch size, the batch dim of each tensor (None: guess) and that size."""
    if callable(example):
        if batch is None:
            raise InputError("pass global_batch: example_inputs is a function of the batch size")
        return example(batch), find_batch_dims(example, batch), batch
    args, kwargs = as_call(example)
    leaves, structure = flatten((*args, kwargs))
    size = next((x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim()), None)
    if size is None:
        raise InputError("example_inputs holds no tensor, so the batch size is unknown; pass the inputs of one step")
    if batch is None or batch == size:
        return example, None, size
    *args, kwargs = unflatten(structure, [_resized(x, size, batch) for x in leaves])  # type: ignore[misc]
    return kwargs or tuple(args), None, batch


def _resized(value: object, size: int, batch: int) -> object:
    if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != size:
        return value
    return torch.empty((batch, *value.shape[1:]), dtype=value.dtype, device="meta")


def _model_dtype(model: nn.Module) -> str:
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    return "/".join(sorted(kinds)) or "float32"
