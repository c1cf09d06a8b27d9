"""``autoplan profile``: measure this machine, write a cluster file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from autoplan.cli import flags
from autoplan.cli.answers import exit_codes, refuse_unwritable, write_output
from autoplan.cli.progress import Progress, planning_work
from autoplan.errors import InputError

if TYPE_CHECKING:
    from autoplan.profiler.cases import Case
    from autoplan.profiler.profile import Asked

Device = Annotated[
    Literal["cpu", "cuda"] | None, typer.Option(help="What to measure. Default: the GPUs when there are any.")
]
Ranks = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Start N ranks on this CPU, of one thread each, and measure all.")
]
ModelOps = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar="MODEL", help="Measure the ops of this model too, at its local shapes. May be repeated."
    ),
]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write the cluster file.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few small sizes, briefly: a first look.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what is known.")]


def profile(
    *, device: Device = None, output: Output = "local.toml", ranks: Ranks = None, model: ModelOps = None,
    global_batch: flags.GlobalBatch = None, seq_len: flags.SeqLen = None, quick: Quick = False, fresh: Fresh = False,
) -> None:  # fmt: skip
    """Measure this machine and write a cluster file for autoplan search --cluster.

    Alone it measures one process; under torchrun all of its ranks, and their collectives. What was measured is kept
    beside the file (FILE.measured): a run that was interrupted goes on where it stopped.

    \b
    Examples:
      autoplan profile --ranks 4 -o local.toml
      torchrun --nproc-per-node 8 -m autoplan.cli.main profile -o node.toml
      autoplan profile --ranks 4 --model examples/nanogpt.py -o local.toml
      autoplan search examples/nanogpt.py --cluster local.toml

    \b
    Exit codes: 0 done, 2 bad usage or input, 130 interrupted (what was measured is written all the same).
    """
    is_first = os.environ.get("RANK", "0") == "0"
    with exit_codes():
        refuse_unwritable(output)
        if ranks is not None and (device == "cuda" or "RANK" in os.environ):
            raise InputError("--ranks starts ranks on the CPU by itself: leave out torchrun and --device cuda")
        with planning_work() as progress:
            import torch  # --help can do without

            from autoplan.profiler import profile as profiler

            chosen = device or ("cuda" if torch.cuda.is_available() and ranks is None else "cpu")
            if chosen == "cuda" and not torch.cuda.is_available():
                raise InputError("torch sees no CUDA device here: use --device cpu")
            shape = profiler.shape_of(ranks)
            asked = profiler.Asked(
                device=chosen, cache=Path(f"{output}.measured"), models=tuple(model or ()), global_batch=global_batch,
                seq_len=seq_len, quick=quick, fresh=fresh,
            )  # fmt: skip
            cases = profiler.cases_of(asked, shape, progress) if is_first else ()
            try:
                _measure(asked, cases, ranks, progress)
            finally:
                if is_first and asked.cache.exists():
                    write_output(output, profiler.cluster_file(asked, shape, cases))
        if is_first:
            typer.echo(f"The cluster file was written to {output}: autoplan search MODEL --cluster {output}")


def _measure(asked: "Asked", cases: Sequence["Case"], ranks: int | None, progress: Progress) -> None:
    from autoplan.profiler import profile as profiler
    from autoplan.profiler.ranks import run_ranks

    if ranks is not None and profiler.is_known(asked, profiler.shape_of(ranks), cases):
        return
    if ranks is None:
        profiler.run(asked, cases, progress)
    else:
        run_ranks(ranks, profiler.run, asked, cases, told=progress)
