"""Model in, plan out: the planning half of the public calls, which loads nothing of the runtime."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from autoplan.cluster import Cluster
from autoplan.cost_models import ProfileCostModel, load_cluster
from autoplan.errors import InputError
from autoplan.plan.plan import Plan, Recompute
from autoplan.plan.verify import verify_plan
from autoplan.randomness import random_ops
from autoplan.solver.request import OptimizerName, Request
from autoplan.solver.solve import solve
from autoplan.trace.capture import Traced, trace_model
from autoplan.trace.inputs import Inputs, as_call, find_batch_dims
from autoplan.trace.segments import segment_graph
from autoplan.trace.source import load_model
from autoplan.trace.tree import flatten, unflatten

__all__ = ["search", "search_source"]

log = logging.getLogger(__name__)

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
ExampleInputs = Inputs | Callable[[int], Inputs]
SAMPLES_PER_DEVICE = 8
"""Global batch of a search that is given none."""


def search(
    model: nn.Module,
    example_inputs: ExampleInputs,
    *,
    cluster: str | tuple[Cluster, ProfileCostModel] = "local",
    global_batch: int | None = None,
    dtype: str | None = None,
    optimizer: OptimizerName = "adamw",
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = None,
    microbatch: int | None = None,
    recompute: Recompute | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Search a plan for training ``model`` on ``cluster`` (``8xH100``, ``16x8xA100-80GB``, ``local``, a TOML file).

    ``example_inputs`` is a dict or tuple as the model takes it, or a function from the batch size to one; only shapes
    matter, and dim 0 counts samples. ``global_batch`` is the number of samples of a step (default: that of the
    example). ``dtype`` is bf16, fp32 or fp64 (default: the model's). Degrees and ``microbatch`` (samples) pin a
    choice. Raises InputError for what cannot be used, InfeasibleError when nothing fits.
    """
    inputs, dims, batch = _at_batch(example_inputs, global_batch)
    kind = None if dtype is None else _dtype(dtype)
    report = progress or log.info
    report("tracing the model")
    traced = trace_model(model, inputs, batch_dims=dims, dtype=kind)
    found, cost = _resolve(cluster)
    request = Request(
        model=type(model).__name__, dtype=kind or _model_dtype(model), optimizer=optimizer, pp=pp, dp=dp, tp=tp,
        microbatch=microbatch, recompute=recompute, time_limit_s=time_limit_s,
        assumptions=(("global batch", str(batch)), *(("note", note) for note in traced.notes)),
    )  # fmt: skip
    return _solve(traced, found, cost, request, report)


def search_source(
    spec: str,
    *,
    cluster: str,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    optimizer: OptimizerName = "adamw",
    pp: int | None = None,
    dp: int | None = None,
    tp: int | None = None,
    microbatch: int | None = None,
    recompute: Recompute | None = None,
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Search a plan for a model file (``model.py``, ``model.py:factory``) or a Hugging Face ``config.json``.

    Like ``search``; ``seq_len`` sets the sequence length where the model file lets it be set, ``dtype`` defaults to
    bf16 on GPUs and fp32 on CPUs, ``global_batch`` to 8 samples per device. No weights are allocated.
    """
    report = progress or log.info
    found, cost = load_cluster(cluster)
    batch = global_batch or SAMPLES_PER_DEVICE * found.num_devices
    kind = _dtype(dtype or ("fp32" if found.device == "cpu" else "bf16"))
    source = load_model(spec, seq_len=seq_len)
    report(f"building and tracing {source.name}")
    inputs = source.example_inputs(batch)
    dims = find_batch_dims(source.example_inputs, batch)
    traced = trace_model(source.build(), inputs, batch_dims=dims, dtype=kind)
    default = "" if global_batch else f" (default: {SAMPLES_PER_DEVICE} per device)"
    request = Request(
        model=source.name, dtype=kind, optimizer=optimizer, pp=pp, dp=dp, tp=tp, microbatch=microbatch,
        recompute=recompute, time_limit_s=time_limit_s,
        assumptions=(
            ("global batch", f"{batch}{default}"),
            *(("sequence length", str(seq_len)) for _ in range(seq_len is not None)),
            *(("note", note) for note in (*source.notes, *traced.notes)),
        ),
    )  # fmt: skip
    return _solve(traced, found, ProfileCostModel(cluster=found, profile=cost), request, report)


def _solve(
    traced: Traced, cluster: Cluster, cost: ProfileCostModel, request: Request, progress: Callable[[str], None]
) -> Plan:
    progress(f"finding repeated blocks in {len(traced.graph.nodes)} ops")
    segmented = segment_graph(traced.graph)
    if random_ops(traced.graph):
        note = "the model drops out; a training run by this plan is refused until dropout is 0 in its configuration"
        request = replace(request, assumptions=(*request.assumptions, ("note", note)))
    plan = solve(segmented, cluster, cost, request, profile_digest=cost.profile.digest, progress=progress)
    verify_plan(plan)
    return plan


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


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, found {name!r}")
    return DTYPES[name]


def _model_dtype(model: nn.Module) -> str:
    kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    return "/".join(sorted(kinds)) or "float32"
