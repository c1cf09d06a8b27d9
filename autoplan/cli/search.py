"""``autoplan search``: flags in; words, files and exit codes out (see ``answers``)."""

import sys
from contextlib import redirect_stdout
from typing import Annotated, Literal

import typer
from rich.console import Console

from autoplan.cli.answers import exit_codes, refuse_unwritable, write_output
from autoplan.cli.progress import Progress
from autoplan.plan.file import plan_json
from autoplan.plan.plan import Recompute

_SPEC = "8xH100, 16x8xA100-80GB (nodes x devices), 4xcpu, local, or a TOML file."


def search(  # noqa: PLR0913 (one parameter per flag)
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A Python file with build_model() and example_inputs(batch_size), "
            "file.py:factory, or a Hugging Face config.json.",
        ),
    ],
    *,
    cluster: Annotated[str, typer.Option(metavar="SPEC", help=_SPEC)],
    global_batch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples per training step.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens per sample.")] = None,
    dtype: Annotated[
        Literal["bf16", "fp32", "fp64"] | None, typer.Option(help="Default: bf16 on GPUs, fp32 on CPUs.")
    ] = None,
    optimizer: Annotated[Literal["adamw", "sgd"], typer.Option(help="Optimizer whose states must fit.")] = "adamw",
    pp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Pin the number of pipeline stages.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Pin the data-parallel degree.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Pin the tensor-parallel degree.")] = None,
    microbatch: Annotated[int | None, typer.Option(min=1, metavar="N", help="Pin the samples per microbatch.")] = None,
    recompute: Annotated[Recompute | None, typer.Option(help="Pin what the backward pass computes again.")] = None,
    time_limit: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds to search.")] = 60.0,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the plan.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON on stdout, nothing else.")] = False,
) -> None:
    """Search the fastest plan that fits. A degree that is given is pinned, the others are searched.

    \b
    Examples:
      autoplan search examples/nanogpt.py --cluster 8xH100 -o plan.json
      autoplan search config.json --cluster 16x8xA100-80GB --global-batch 1024 --seq-len 8192 --tp 8

    \b
    Exit codes: 0 found, 2 bad usage or input, 3 no plan fits.
    """
    with exit_codes():
        if output is not None:
            refuse_unwritable(output)
        with Progress(Console(stderr=True)).shown() as progress:
            progress("loading torch")
            from autoplan import planning  # loads torch, which --help and report can do without

            with redirect_stdout(sys.stderr):  # what the user's model prints must not mix with the plan
                plan = planning.search_source(
                    model, cluster=cluster, global_batch=global_batch, seq_len=seq_len, dtype=dtype,
                    optimizer=optimizer, pp=pp, dp=dp, tp=tp, microbatch=microbatch, recompute=recompute,
                    time_limit_s=time_limit, progress=progress,
                )  # fmt: skip
        typer.echo(plan_json(plan) if as_json else str(plan), nl=False)
        if output is not None:
            write_output(output, plan_json(plan))
        _say_where(output, err=as_json)


def _say_where(output: str | None, err: bool) -> None:
    if output is None:
        typer.echo("\nThe plan was not written: add -o plan.json to keep it.", err=True)
    else:
        typer.echo(f"\nThe plan was written to {output}", err=err)
