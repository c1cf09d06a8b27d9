"""Flags of the commands: their names, what they take and what they are for."""

from typing import Annotated, Literal

import typer

from autoplan.errors import InputError
from autoplan.plan.plan import DataMode, Recompute, ScheduleKind

Dtype = Literal["bf16", "fp32", "fp64"]

_MODEL = (
    "A Python file with build_model() and example_inputs(batch_size), file.py:factory, or a Hugging Face config.json."
)
_SPEC = (
    "8xH100, 16x8xA100-80GB (nodes x devices), 4xcpu, local, or a TOML file. Given several times: one table that "
    "compares them."
)


def _count(help_text: str) -> object:
    return typer.Option(min=1, metavar="N", help=help_text)


def _list(flag: str, metavar: str, help_text: str) -> object:
    return typer.Option(flag, metavar=metavar, help=f"{help_text} May be repeated.")


Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
Clusters = Annotated[list[str], typer.Option("--cluster", metavar="SPEC", help=_SPEC)]
PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="A file that autoplan search wrote.")]
OtherModel = Annotated[str | None, typer.Option("--model", metavar="MODEL", help="Default: that of the plan.")]
OtherCluster = Annotated[str | None, typer.Option("--cluster", metavar="SPEC", help="Default: that of the plan.")]
OtherClusters = Annotated[
    list[str] | None, typer.Option("--cluster", metavar="SPEC", help="Default: that of the plan. May be repeated.")
]
GlobalBatch = Annotated[int | None, _count("Samples per training step.")]
SeqLen = Annotated[int | None, _count("Tokens per sample.")]
MainDtype = Annotated[Dtype | None, typer.Option(help="Of parameters. Default: bf16 on GPUs, fp32 on CPUs.")]
Optimizer = Annotated[Literal["adamw", "sgd"], typer.Option(help="Optimizer whose states must fit.")]
GradDtype = Annotated[Dtype | None, typer.Option(help="Of gradients. Default: the parameter's.")]
ReduceDtype = Annotated[Dtype | None, typer.Option(help="In which gradients are summed. Default: the parameter's.")]
StateDtype = Annotated[Dtype | None, typer.Option(help="Of optimizer states. Default: the parameter's.")]
MasterDtype = Annotated[Dtype | None, typer.Option(help="Of a copy of the parameters that the optimizer updates.")]
Pp = Annotated[int | None, _count("Pin the places of the pipeline.")]
Dp = Annotated[int | None, _count("Pin the data-parallel degree.")]
Cp = Annotated[int | None, _count("Pin the context-parallel degree.")]
Tp = Annotated[int | None, _count("Pin the tensor-parallel degree.")]
Ep = Annotated[int | None, _count("Pin the data ranks over which experts are split.")]
Microbatch = Annotated[int | None, _count("Pin the samples per microbatch.")]
RecomputeFlag = Annotated[Recompute | None, typer.Option(help="Pin what the backward pass computes again.")]
Schedule = Annotated[ScheduleKind | None, typer.Option(help="Pin the pipeline schedule.")]
Chunks = Annotated[int | None, _count("Pin the stages per place of the pipeline.")]
Data = Annotated[DataMode | None, typer.Option(help="Pin what data ranks share: nothing, up to parameters (shard).")]
Shards = Annotated[int | None, _count("Pin the data ranks that share one copy of the states (hybrid sharding).")]
Cuts = Annotated[
    str | None, typer.Option(metavar="N,N,...", help="Pin the segments at which stages after the first begin.")
]
Offload = Annotated[bool, typer.Option("--offload", help="Allow optimizer states in host memory.")]
Pin = Annotated[
    list[str] | None,
    _list("--pin", "PATTERN=tp:PLACEMENT", 'Where weights must lie: "layers.*.mlp.w1.weight=tp:Shard(0)".'),
]
Forbid = Annotated[
    list[str] | None, _list("--forbid", "WHAT", "What may not be: as --pin, or NAME=VALUE such as schedule=zbv.")
]
Keep = Annotated[list[str] | None, _list("--keep", "MODULE", "A module that the tensor axis leaves whole.")]
Runnable = Annotated[bool, typer.Option("--runnable", help="Leave out what this version cannot run yet.")]
Gap = Annotated[
    float | None, typer.Option(metavar="SHARE", help="Stop when proven this near to optimal. Default: 0.01 (1%).")
]
Top = Annotated[int | None, _count("How many good plans to find and to show.")]
TimeLimit = Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds to search.")]
MinDevices = Annotated[
    bool, typer.Option("--min-devices", help="Find the fewest devices of this kind on which it fits, and plan there.")
]
Output = Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the plan.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, nothing else.")]
Tokens = Annotated[
    str | None,
    typer.Option("--tokens", metavar="N", help="Tokens to train on (15T, 1.5B, 300M): adds the time it takes."),
]
Price = Annotated[
    float | None,
    typer.Option("--price", metavar="P", help="Price of one device for one hour: adds the cost, with the formula."),
]
Prices = Annotated[
    list[float] | None,
    typer.Option(
        "--price",
        metavar="P",
        help="Price of one device for one hour: adds the cost, with the formula. With several clusters: one for all, "
        "or one for each in their order.",
    ),
]


def parse_cuts(text: str | None) -> tuple[int, ...] | None:
    """``12,24,36`` as numbers. Raises InputError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise InputError(f"--cuts {text!r} is not a list of segments; write it as 12,24,36")
    return tuple(map(int, parts))
