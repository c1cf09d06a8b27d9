"""How long ``autoplan search`` takes, how much memory, and how good it can say its answer is.

Each row runs in a process of its own: wall time from its start to the plan on disk, the peak memory the system saw, and
from the plan how many candidates were solved, bounded away or refused, and the gap. Targets are compared with, never
enforced::

    python benchmarks/search_time.py                              # the table
    python benchmarks/search_time.py --rows gpt2,llama-3-8b       # some of it
    python benchmarks/search_time.py --scaling                    # with layers and devices doubled too
    python benchmarks/search_time.py --json benchmarks/results/search_time.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from record import record
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rows import ROOT, ROWS, SCALING, Row, find_row

from autoplan import AutoplanError, Plan

TRACING, SEARCHING = "building and tracing", "finding repeated blocks"
"""Progress lines with which the search begins to trace, and to look at what was traced."""
NOISE = 0.1
"""Share by which two runs of one search may differ in time on a shared machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one run; None where the progress lines did not tell."""

    wall_s: float
    startup_s: float | None = None
    trace_s: float | None = None
    search_s: float | None = None
    cpu_s: float = 0.0
    """Of all cores, user and system: what an idle machine would tell too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the plan says of itself."""

    label: str
    step_us: float
    gap: float
    status: str
    num_solved: int
    num_bounded: int
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One row, run once."""

    row: Row
    command: str
    timing: Timing
    peak_bytes: int
    exit_code: int
    answer: Answer | None
    """None when there is no plan."""
    said: tuple[str, ...]
    """The last lines of its progress."""


def main() -> None:
    options = _options()
    err = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rows = [find_row(name, Path(scratch)) for name in options.rows]
        except ValueError as error:
            sys.exit(f"search_time.py: {error}")
        before = _import_s()
        found = [_measure(row, Path(scratch), f"[{i}/{len(rows)}] {row.name}", err) for i, row in enumerate(rows, 1)]
        imports = sorted((before, _import_s()))
    out = Console(width=None if sys.stdout.isatty() else 160)
    out.print(_table(found))
    out.print(f"Of each row, importing torch and torch.export alone takes {imports[0]:.1f} to {imports[1]:.1f} s here.")
    if any(one.row.doubled for one in found):
        out.print(_scaling_table(found))
    if options.json:
        text = json.dumps(
            record(sys.argv, [asdict(one) for one in found]) | {"torch_import_s": list(imports)}, indent=2
        )
        Path(options.json).write_text(text + "\n", encoding="utf-8")


def _import_s() -> float:
    """Seconds that a fresh process takes to import what every trace needs: how fast the machine is at the moment."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import gc; gc.disable(); import torch, torch.export._trace"], check=True)
    return time.monotonic() - start


def _options() -> argparse.Namespace:
    names = ", ".join(row.name for row in ROWS)
    parser = argparse.ArgumentParser(description="Time and memory of autoplan search against the targets.")
    parser.add_argument("--rows", default="", help=f"names, separated by commas: {names}, also NAME+layers, +devices")
    parser.add_argument("--scaling", action="store_true", help=f"also {', '.join(SCALING)}")
    parser.add_argument("--json", metavar="FILE", help="also write every number, with versions and hardware")
    options = parser.parse_args()
    names = options.rows.split(",") if options.rows else [row.name for row in ROWS]
    options.rows = [*names, *(name for name in SCALING if options.scaling and name not in names)]
    return options


def _measure(row: Row, scratch: Path, title: str, err: Console) -> Measured:
    """Run the row's search in a fresh process; its progress is shown while it runs."""
    plan_file = scratch / f"{row.name}.json"
    search = [
        "search", row.model, "--cluster", row.cluster, "--global-batch", str(row.global_batch),
        "--seq-len", str(row.seq_len), "-o",
    ]  # fmt: skip
    command = [sys.executable, "-m", "autoplan.cli.main", *search, str(plan_file)]
    if err.is_terminal:
        with err.status(title) as status:
            ended = _run(command, lambda line: status.update(f"{title}: {escape(line)}"))
    else:
        err.print(title, highlight=False, markup=False)
        ended = _run(command, lambda line: None)
    written = plan_file.exists()
    answer, unreadable = _answer(plan_file) if written else (None, ())
    return Measured(
        row=row,
        command=" ".join(["autoplan", *search, "plan.json"]),
        timing=_timing(ended, plan_file.stat().st_mtime - ended.started if written else ended.wall_s),
        peak_bytes=ended.peak_bytes,
        exit_code=ended.exit_code,
        answer=answer,
        said=(*(line for _, line in ended.lines[-20:]), *unreadable),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A process that ended: when it started (epoch seconds), what it said and when, what it took."""

    started: float
    wall_s: float
    cpu_s: float
    lines: tuple[tuple[float, str], ...]
    peak_bytes: int
    exit_code: int


def _run(command: list[str], show: Callable[[str], None]) -> _Ended:
    """Run to the end; peak memory is that of the process and of children it waited for, whichever is largest."""
    lines: list[tuple[float, str]] = []
    started = time.time()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append((time.time() - started, line.rstrip()))
            show(line.rstrip())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    kib = usage.ru_maxrss // 1024 if sys.platform == "darwin" else usage.ru_maxrss  # macOS counts bytes
    return _Ended(
        started=started,
        wall_s=time.time() - started,
        cpu_s=usage.ru_utime + usage.ru_stime,
        lines=tuple(lines),
        peak_bytes=kib * 1024,
        exit_code=process.returncode,
    )


def _timing(ended: _Ended, wall_s: float) -> Timing:
    """Phases by the progress lines that begin them; ``wall_s`` is when the plan was written."""
    whole = Timing(wall_s=wall_s, cpu_s=ended.cpu_s)
    traced = next((at for at, line in ended.lines if line.startswith(TRACING)), None)
    searched = next((at for at, line in ended.lines if line.startswith(SEARCHING)), None)
    if traced is None or searched is None:
        return whole
    return replace(whole, startup_s=traced, trace_s=searched - traced, search_s=wall_s - searched)


def _answer(plan_file: Path) -> tuple[Answer | None, tuple[str, ...]]:
    """What the plan says, or why it cannot be read."""
    try:
        plan = Plan.load(str(plan_file))
    except AutoplanError as error:
        return None, (str(error),)
    proof = plan.proof
    sizes = " ".join(f"{axis}={size}" for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True))
    answer = Answer(
        label=f"{sizes}, {plan.num_microbatches} microbatches, {plan.schedule}, {plan.data}",
        step_us=plan.step.total,
        gap=proof.gap(plan.step.total),
        status=proof.status,
        num_solved=proof.num_solved,
        num_bounded=proof.num_bounded,
        num_refused=proof.num_refused,
    )
    return answer, ()


def _verdict(one: Measured) -> str:
    """Every target that was missed, and by how much."""
    if one.answer is None:
        return f"no plan, exit code {one.exit_code}: {next((line for line in reversed(one.said) if line), '')}"
    over = (
        ("time", one.timing.wall_s - one.row.limit_s, "{:.1f} s"),
        ("memory", (one.peak_bytes - one.row.limit_bytes) / 1e9, "{:.2f} GB"),
        ("gap", 100 * (one.answer.gap - one.row.limit_gap), "{:.2f} points"),
    )
    missed = [f"{what} missed by {text.format(excess)}" for what, excess, text in over if excess > 0]
    if one.answer.status != "complete":
        missed.append(f"search not complete: {one.answer.status}")
    return "; ".join(missed) or "ok"


def _table(found: list[Measured]) -> Table:
    table = Table(box=box.SIMPLE)
    for name in ("row", "cluster"):
        table.add_column(name, no_wrap=True)
    for name in (
        "wall s",
        "at most",
        "start",
        "trace",
        "search",
        "cpu s",
        "peak GB",
        "solved",
        "bounded",
        "refused",
        "gap %",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for one in found:
        timing, answer = one.timing, one.answer
        counts = (answer.num_solved, answer.num_bounded, answer.num_refused) if answer else ("-",) * 3
        gap = f"{100 * answer.gap:.2f}" if answer else "-"
        phases = [*map(_seconds, (timing.startup_s, timing.trace_s, timing.search_s, timing.cpu_s))]
        table.add_row(
            one.row.name, one.row.cluster, f"{timing.wall_s:.1f}", f"{one.row.limit_s:g}", *phases,
            f"{one.peak_bytes / 1e9:.2f}", *map(str, counts), gap, escape(_verdict(one)),
        )  # fmt: skip
    return table


def _scaling_table(found: list[Measured]) -> Table:
    """Rows with doubled layers or devices beside the rows they double."""
    table = Table(box=box.SIMPLE, title="doubled", title_justify="left")
    for name in ("row", "trace s", "search s", "wall s", "verdict"):
        table.add_column(name, justify="left" if name in ("row", "verdict") else "right")
    bases = {one.row.name: one for one in found}
    for one in (one for one in found if one.row.doubled):
        base = bases.get(one.row.base)
        table.add_row(
            one.row.name,
            _change(base and base.timing.trace_s, one.timing.trace_s),
            _change(base and base.timing.search_s, one.timing.search_s),
            _change(base and base.timing.wall_s, one.timing.wall_s),
            _scaling_verdict(base, one),
        )
    return table


def _scaling_verdict(base: Measured | None, one: Measured) -> str:
    """Twice the layers may add tracing time only, twice the devices a quarter of the whole."""
    if base is None:
        return f"run {one.row.base} too"
    if base.answer is None or one.answer is None:
        return "no plan"
    if one.row.doubled == "devices":
        excess = one.timing.wall_s - 1.25 * base.timing.wall_s
    elif base.timing.search_s is None or one.timing.search_s is None:
        return "phases unknown"
    else:
        excess = one.timing.search_s - (1 + NOISE) * base.timing.search_s
    return f"missed by {excess:.1f} s" if excess > 0 else "ok"


def _change(before: float | None, after: float | None) -> str:
    return f"{_seconds(before)} -> {_seconds(after)}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


if __name__ == "__main__":
    main()
