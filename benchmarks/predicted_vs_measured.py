"""What plans say of their step time and memory, against what they take on this machine: gloo ranks on its processors.

Profiles the machine with ``autoplan profile`` (once: what is measured is kept in ``--folder``), searches each pinned
plan by that profile, runs all of them by ``autoplan.compile`` in turns, and compares::

    python benchmarks/predicted_vs_measured.py
    python benchmarks/predicted_vs_measured.py --ranks 2 --models small_gpt --rounds 2
    python benchmarks/predicted_vs_measured.py --json benchmarks/results/predicted_vs_measured.json

Measured times are medians over the steps of all rounds, but those during which other work took more than a tenth of the
processors (a turn is repeated a few times for quiet); memory is explained at ``ranks.peak_bytes``. The plan that the
search chooses without pins is a row of each group too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ranks as jobs
from ranks import RankPool
from record import record
from rich.console import Console
from rich.table import Table

import autoplan
from autoplan import Plan

ROOT = Path(__file__).resolve().parent.parent
BATCH = 16
QUIET, TRIES = 0.1, 4
LEAST_CORRELATION, MOST_REGRET, MOST_MEMORY_ERROR = 0.9, 0.1, 0.1

PINS: dict[int, tuple[dict[str, object], ...]] = {
    2: (
        {"dp": 2, "data": "replicate"},
        {"dp": 2, "data": "replicate", "microbatch": 2},
        {"dp": 2, "data": "replicate", "recompute": "full"},
        {"dp": 2, "data": "shard"},
        {"dp": 2, "data": "shard", "microbatch": 2},
        {"pp": 2, "microbatch": 8},
        {"pp": 2, "microbatch": 4},
        {"pp": 2, "microbatch": 1},
        {"pp": 2, "microbatch": 4, "recompute": "full"},
        {"tp": 2, "microbatch": 16},
        {"tp": 2, "microbatch": 4},
        {"tp": 2, "microbatch": 16, "recompute": "selective"},
    ),
    4: (
        {"dp": 4, "data": "replicate"},
        {"dp": 4, "data": "shard"},
        {"dp": 4, "data": "replicate", "microbatch": 1},
        {"pp": 4, "microbatch": 4},
        {"pp": 4, "microbatch": 1},
        {"tp": 4, "microbatch": 16},
        {"tp": 4, "microbatch": 4},
        {"pp": 2, "dp": 2, "data": "replicate", "microbatch": 2},
        {"pp": 2, "dp": 2, "data": "replicate", "microbatch": 4, "recompute": "full"},
        {"pp": 2, "tp": 2, "microbatch": 4},
        {"dp": 2, "tp": 2, "data": "replicate", "microbatch": 8},
        {"dp": 2, "tp": 2, "data": "shard", "microbatch": 4},
    ),
}
"""Choices by number of ranks; what is not pinned is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan with what it says, and what was measured: microseconds and bytes of the slowest, and fullest, rank."""

    model: str
    ranks: int
    pins: str
    predicted_us: float
    predicted_bytes: float
    measured_us: float
    measured_bytes: float
    others: float
    """Share of the processors that other work took during the steps that count."""
    chosen: bool
    by_cause: tuple[tuple[str, float], ...]
    memory_by_cause: tuple[tuple[str, float], ...]

    @property
    def time_error(self) -> float:
        return self.predicted_us / self.measured_us - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan on disk."""

    name: str
    pins: str
    plan: Plan
    file: Path
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A step, and the share of the processors that other work took meanwhile."""

    us: float
    others: float


def main() -> None:
    options = _options()
    console = Console(width=140)
    rows: list[Row] = []
    for size in options.ranks:
        cluster = _profile(size, options)
        pool = RankPool(size)
        try:
            for model in options.models:
                rows += _group(pool, size, model, cluster, options)
                _show(console, [row for row in rows if (row.model, row.ranks) == (model, size)])
        finally:
            pool.close()
    _summary(console, rows)
    if options.json:
        raw = [{**asdict(row)} for row in rows]
        Path(options.json).write_text(json.dumps(record(sys.argv, raw), indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], choices=sorted(PINS))
    parser.add_argument("--models", nargs="+", default=["small_gpt", "small_llama"])
    parser.add_argument("--rounds", type=int, default=4, help="how often each plan gets its turn")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn")
    parser.add_argument("--plans", type=int, default=100, help="at most so many pinned plans of each group")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "predicted_vs_measured")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def _model_file(model: str) -> str:
    return str(ROOT / "benchmarks" / "models" / f"{model}.py")


def _profile(size: int, options: argparse.Namespace) -> str:
    """The cluster file of so many busy ranks, with the ops of the models."""
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"cpu-{size}.toml"
    models = [word for model in options.models for word in ("--model", _model_file(model))]
    command = ["profile", "--ranks", str(size), "--global-batch", str(BATCH), *models, "-o", str(file)]
    subprocess.run([sys.executable, "-P", "-m", "autoplan.cli.main", *command], check=True)
    return str(file)


def _group(pool: RankPool, size: int, model: str, cluster: str, options: argparse.Namespace) -> list[Row]:
    """All plans of one model on so many ranks, measured in turns."""
    candidates = list(_candidates(size, model, cluster, options))
    times: dict[str, list[Timed]] = {candidate.name: [] for candidate in candidates}
    memory: dict[str, float] = {}
    for candidate in candidates:
        pool.run(jobs.start, candidate.name, _model_file(model), str(candidate.file), BATCH, timeout=jobs.ANSWER_S)
        memory[candidate.name] = max(pool.run(jobs.peak_bytes, candidate.name, timeout=jobs.ANSWER_S))
    for _ in range(options.rounds):
        for candidate in candidates:
            times[candidate.name] += _turn(pool, candidate.name, options)
    for candidate in candidates:
        pool.run(jobs.stop, candidate.name, timeout=jobs.ANSWER_S)
    return [_row(model, size, candidate, times[candidate.name], memory[candidate.name]) for candidate in candidates]


def _turn(pool: RankPool, name: str, options: argparse.Namespace) -> list[Timed]:
    """The steps of one turn: again, a few times, while other work disturbs them."""
    found: list[Timed] = []
    for _ in range(TRIES):
        per_rank = pool.run(jobs.steps, name, options.steps, timeout=jobs.ANSWER_S)
        found += [_timed(step) for step in zip(*per_rank, strict=True)]
        if sum(step.others <= QUIET for step in found) >= options.steps:
            break
    return found


def _timed(ranks: Sequence[jobs.Step]) -> Timed:
    wall = max(step.wall for step in ranks)
    others = max(0.0, ranks[0].busy - sum(step.own for step in ranks))
    return Timed(us=wall * 1e6, others=others / wall / (os.cpu_count() or 1))


def _quiet(steps: Sequence[Timed]) -> list[Timed]:
    """Those that were not disturbed; where there are too few, the quarter that was disturbed least."""
    ordered = sorted(steps, key=lambda step: step.others)
    return ordered[: max(len(ordered) // 4, sum(step.others <= QUIET for step in steps))]


def _candidates(size: int, model: str, cluster: str, options: argparse.Namespace) -> Iterator[Candidate]:
    """The plan that the search chooses, and one for each set of pins."""
    module = jobs.load(_model_file(model))
    built = module.build_model()
    for number, pins in enumerate(({}, *PINS[size][: options.plans])):
        degrees = {axis: 1 for axis in ("pp", "dp", "tp") if pins and axis not in pins}
        print(f"{model} on {size} ranks: searching {pins or 'all'}", file=sys.stderr)
        plan = autoplan.search(
            built, module.example_inputs, cluster=cluster, global_batch=BATCH, runnable=True, **degrees, **pins
        )
        file = options.folder / f"{model}-{size}-{number}.json"
        plan.save(str(file))
        text = " ".join(f"{key}={value}" for key, value in pins.items())
        if not pins:
            text = f"chosen: {plan.choices[0].label}" if plan.choices else "chosen"
        yield Candidate(name=file.stem, pins=text, plan=plan, file=file, chosen=not pins)


def _row(model: str, size: int, candidate: Candidate, times: list[Timed], memory: float) -> Row:
    quiet = _quiet(times)
    fullest = max(candidate.plan.stages, key=lambda stage: stage.memory.total)
    return Row(
        model=model,
        ranks=size,
        pins=candidate.pins,
        predicted_us=candidate.plan.step.total,
        predicted_bytes=fullest.memory.total,
        measured_us=statistics.median(step.us for step in quiet),
        measured_bytes=memory,
        others=statistics.mean(step.others for step in quiet),
        chosen=candidate.chosen,
        by_cause=candidate.plan.step.by_cause,
        memory_by_cause=fullest.memory.by_cause,
    )


def _show(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title=f"{rows[0].model} on {rows[0].ranks} ranks, {BATCH} samples a step")
    for name in ("plan", "predicted", "measured", "error", "others", "memory predicted", "measured", "error"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for row in rows:
        table.add_row(
            row.pins, f"{row.predicted_us / 1e3:.0f} ms", f"{row.measured_us / 1e3:.0f} ms", f"{row.time_error:+.0%}",
            f"{row.others:.0%}", f"{row.predicted_bytes / 1e6:.0f} MB", f"{row.measured_bytes / 1e6:.0f} MB",
            f"{row.memory_error:+.0%}",
        )  # fmt: skip
    console.print(table)


def _summary(console: Console, rows: Sequence[Row]) -> None:
    """Every group against the targets."""
    for model, size in dict.fromkeys((row.model, row.ranks) for row in rows):
        group = [row for row in rows if (row.model, row.ranks) == (model, size)]
        correlation = rank_correlation([r.predicted_us for r in group], [r.measured_us for r in group])
        best = min(row.measured_us for row in group)
        regret = next(row for row in group if row.chosen).measured_us / best - 1
        time = sum(abs(row.time_error) for row in group) / len(group)
        memory = sum(abs(row.memory_error) for row in group) / len(group)
        worst = max(abs(row.memory_error) for row in group)
        console.print(
            f"{model} on {size} ranks, {len(group)} plans: rank correlation {correlation:.2f} (at least "
            f"{LEAST_CORRELATION}), chosen plan {regret:.0%} behind the best (at most {MOST_REGRET:.0%}), mean error "
            f"of step time {time:.0%}, of memory {memory:.0%} (at most {MOST_MEMORY_ERROR:.0%}), at worst {worst:.0%}"
        )


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing theirs."""
    a, b = _ranks(left), _ranks(right)
    mean = (len(a) - 1) / 2
    spread = (sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)) ** 0.5
    return sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True)) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
            for value in values]  # fmt: skip


if __name__ == "__main__":
    main()
