"""How far predicted step times and memory are from what published runs measured.

Reads tables in the format of ``throughput.csv`` and ``memory.csv``, traces each run's model, lays out its plan and
prices it with the estimator that the search uses::

    python benchmarks/cost_accuracy.py --data FOLDER
    python benchmarks/cost_accuracy.py --data FOLDER --source NAME --limit 100 --rows 20 --json out.json

``--rows N`` lists the N rows of each source that are furthest off. Progress goes to stderr.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "models"))

from accuracy.price import Priced, Pricer  # noqa: E402
from accuracy.rows import Run, read_memory, read_throughput  # noqa: E402
from accuracy.stats import Errors, Ranking, errors_of, ranking_of  # noqa: E402
from record import record  # noqa: E402
from rich import box  # noqa: E402 (the models are single files, not a package)
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

EVERY_S = 5.0


def main() -> None:
    """Read, price, print."""
    options = _options()
    folder = Path(options.data)
    times = _chosen(read_throughput(folder), options)
    peaks = read_memory(folder)
    unusable = {run.row: reason for run, reason in peaks if reason}
    memory = _chosen([run for run, _ in peaks], options)
    pricer = Pricer()
    pricer.expect([*times, *memory])
    start = time.monotonic()
    timed = _priced(pricer, [run for run in times if options.part != "memory"], {})
    sized = _priced(pricer, [run for run in memory if options.part != "time"], unusable)
    seconds = time.monotonic() - start
    console = Console(width=150)
    found = [*_report_times(console, timed, options.rows), *_report_memory(console, sized, options.rows)]
    count = len(timed) + len(sized)
    console.print(f"{count} rows in {seconds:.1f} s, {100 * seconds / max(1, count):.1f} s per hundred")
    if options.json:
        text = json.dumps(record(sys.argv, [*found, *map(_row, [*timed, *sized])]), indent=1)
        Path(options.json).write_text(text, encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with throughput.csv and memory.csv")
    parser.add_argument("--json", help="write a record of the run here")
    parser.add_argument("--source", help="only this source_group")
    parser.add_argument("--limit", type=int, default=0, help="at most so many rows of each source, evenly picked")
    parser.add_argument("--rows", type=int, default=0, help="list so many rows of each source, worst first")
    parser.add_argument("--part", choices=("time", "memory"), help="only one of the two tables")
    return parser.parse_args()


def _chosen(runs: Sequence[Run], options: argparse.Namespace) -> list[Run]:
    """The rows asked for, those of one model together."""
    found: list[Run] = []
    for source in dict.fromkeys(run.source for run in runs):
        mine = [run for run in runs if run.source == source and options.source in (None, source)]
        step = max(1, len(mine) // options.limit) if options.limit else 1
        found += mine[::step][: options.limit or None]
    return sorted(found, key=lambda run: (run.source, run.model, run.sizes.seq_len))


def _priced(pricer: Pricer, runs: Sequence[Run], unusable: dict[str, str]) -> list[Priced]:
    found, said = [], time.monotonic()
    for index, run in enumerate(runs):
        reason = unusable.get(run.row, "")
        found.append(Priced(run=run, reason=reason) if reason else pricer.price(run))
        if time.monotonic() - said > EVERY_S:
            said = time.monotonic()
            print(f"{index + 1} of {len(runs)} rows", file=sys.stderr, flush=True)
    return found


def _report_times(console: Console, priced: Sequence[Priced], most: int) -> list[dict[str, object]]:
    if not priced:
        return []
    table = Table(title="Step time", box=box.SIMPLE)
    for name in ("source", "rows", "used", "mean", "median", "bias", "groups", "rank corr", "regret", "worst"):
        table.add_column(name, justify="left" if name in ("source", "rows") else "right")
    found: list[dict[str, object]] = []
    for source in dict.fromkeys(one.run.source for one in priced):
        mine = [one for one in priced if one.run.source == source]
        used = [one for one in mine if one.step is not None and one.run.step_s]
        for words, some in (("all", used), ("util >= 0.15, A/B", [one for one in used if one.run.is_judged])):
            errors, ranking = errors_of([(one.step_s, one.run.step_s or 0) for one in some]), ranking_of(some)
            table.add_row(source, words, f"{len(some)}/{len(mine)}", *_cells(errors, ranking))
            figures = {"errors": errors and asdict(errors), "ranking": asdict(ranking)}
            found.append({"source": source, "rows": words, "skipped": _skipped(mine), **figures})
    console.print(table)
    _print_skipped(console, priced)
    _print_rows(console, [one for one in priced if one.step and one.run.step_s], most, "s", _time_pair)
    return found


def _report_memory(console: Console, priced: Sequence[Priced], most: int) -> list[dict[str, object]]:
    if not priced:
        return []
    table = Table(title="Peak memory", box=box.SIMPLE)
    for name in ("source", "kind", "used", "mean", "median", "bias"):
        table.add_column(name, justify="left" if name in ("source", "kind") else "right")
    found: list[dict[str, object]] = []
    usable = [one for one in priced if one.step is not None]
    peaks = [one for one in usable if one.run.status == "ok" and one.run.peak_gib]
    for source, kind in dict.fromkeys((one.run.source, one.run.memory_kind) for one in peaks):
        mine = [one for one in peaks if (one.run.source, one.run.memory_kind) == (source, kind)]
        errors = errors_of([_memory_pair(one) for one in mine])
        assert errors is not None
        table.add_row(source, kind, str(errors.count), *_shares(errors.mean_abs, errors.median_abs, errors.bias))
        found.append({"source": source, "memory": kind, "errors": asdict(errors)})
    console.print(table)
    for status in ("oom", "oom_or_crash"):
        mine = [one for one in usable if one.run.status == status]
        right = sum(not one.fits for one in mine)
        console.print(f"{status}: {right} of {len(mine)} called too large")
        found.append({"status": status, "rows": len(mine), "right": right})
    fits = [one for one in usable if one.run.status == "ok"]
    console.print(f"ok: {sum(one.fits for one in fits)} of {len(fits)} called small enough\n")
    _print_skipped(console, priced)
    _print_rows(console, peaks, most, "GiB", _memory_pair)
    return found


def _time_pair(one: Priced) -> tuple[float, float]:
    return one.step_s, one.run.step_s or 0.0


def _memory_pair(one: Priced) -> tuple[float, float]:
    return one.peak_gib, one.run.peak_gib or 0.0


def _cells(errors: Errors | None, ranking: Ranking) -> list[str]:
    if errors is None:
        return ["-"] * 7
    return [
        *_shares(errors.mean_abs, errors.median_abs, errors.bias), str(ranking.groups),
        "-" if ranking.correlation is None else f"{ranking.correlation:.3f}",
        *_shares(ranking.regret, ranking.worst_regret),
    ]  # fmt: skip


def _shares(*values: float | None) -> list[str]:
    return ["-" if value is None else f"{100 * value:.1f} %" for value in values]


def _skipped(priced: Iterable[Priced]) -> dict[str, int]:
    reasons = Counter(one.reason or "no measured step time" for one in priced if not (one.step and one.run.step_s))
    return dict(reasons.most_common())


def _print_skipped(console: Console, priced: Sequence[Priced]) -> None:
    for source in dict.fromkeys(one.run.source for one in priced):
        skipped = Counter(one.reason for one in priced if one.run.source == source and one.reason)
        for reason, count in skipped.most_common():
            console.print(f"{source}: {count} skipped, {reason}", highlight=False)
    console.print()


def _print_rows(console: Console, priced: Sequence[Priced], most: int, unit: str, pair: object) -> None:
    if not most:
        return
    for source in dict.fromkeys(one.run.source for one in priced):
        table = Table(title=f"{source}, worst first", box=box.SIMPLE)
        for name in (
            "row",
            "model",
            "devices",
            "plan",
            f"predicted {unit}",
            f"measured {unit}",
            "ratio",
            "util",
            "by cause",
        ):
            table.add_column(name)
        mine = sorted((one for one in priced if one.run.source == source), key=lambda one: -_off(pair(one)))  # type: ignore[operator]
        for one in mine[:most]:
            predicted, measured = pair(one)  # type: ignore[operator]
            table.add_row(
                one.run.row, one.run.model, str(one.run.num_devices), one.run.label, f"{predicted:.3f}",
                f"{measured:.3f}", f"{predicted / measured:.2f}", f"{one.run.utilisation:.2f}", _causes(one, unit),
            )  # fmt: skip
        console.print(table)


def _off(pair: tuple[float, float]) -> float:
    return abs(pair[0] / pair[1] - 1)


def _causes(one: Priced, unit: str) -> str:
    assert one.step is not None
    amounts = one.step.amounts if unit == "s" else one.step.memory[0]
    return " ".join(
        f"{cause[:9]} {100 * value / amounts.total:.0f}%"
        for cause, value in amounts.by_cause
        if value / amounts.total > 0.02
    )


def _row(one: Priced) -> dict[str, object]:
    step = one.step
    found: dict[str, object] = {
        "row": one.run.row,
        "source": one.run.source,
        "plan": one.run.label,
        "reason": one.reason,
    }
    if step is not None:
        found |= {
            "predicted_s": one.step_s, "measured_s": one.run.step_s, "predicted_gib": one.peak_gib,
            "measured_gib": one.run.peak_gib, "status": one.run.status, "fits": one.fits,
            "time_by_cause": dict(step.amounts.by_cause), "memory_by_cause": dict(step.memory[0].by_cause),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    main()
