"""Rows of published runs are laid out as they ran, priced by the estimator of the search, and counted rightly."""

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "models")]

from accuracy.models import shape_of  # noqa: E402 (benchmarks are no package)
from accuracy.places import cost_model_of  # noqa: E402
from accuracy.plans import plan_of, refusal  # noqa: E402
from accuracy.price import Pricer  # noqa: E402
from accuracy.rows import read_memory, read_throughput  # noqa: E402
from accuracy.stats import errors_of, ranking_of, spearman  # noqa: E402

from autoplan.solver.request import Request  # noqa: E402
from autoplan.solver.solve import solve  # noqa: E402

DATA = ROOT / "tests" / "data" / "published"
RUNS = {run.row: run for run in read_throughput(DATA)}
SMALL = next(run for run in RUNS.values() if run.source == "vtrain_single" and run.tp == 1 and run.pp == 2)


@pytest.fixture(scope="module")
def pricer() -> Pricer:
    found = Pricer()
    found.expect(RUNS.values())
    return found


def test_every_share_of_attention_says_where_it_comes_from() -> None:
    found = tomllib.loads((ROOT / "benchmarks" / "data" / "attention.toml").read_text(encoding="utf-8"))
    entries = [entry for table in found.values() for entry in table.values()]
    assert all(set(entry) == {"share", "kind", "source", "date"} and 0 < entry["share"] < 1 for entry in entries)
    assert all(entry["kind"] == "assumed" or "@" in entry["source"] for entry in entries)
    cost = cost_model_of(next(run for run in RUNS.values() if run.source == "llmfoundry" and "H100" in run.gpu))
    assert cost is not None and cost.profile.attention.best == found["flash-1"]["H100"]["share"]


def test_rows_that_cannot_be_priced_say_why() -> None:
    assert {run.row: refusal(run) for run in RUNS.values() if refusal(run)} == {
        run.row: "fp8, which the cost model does not price yet" for run in RUNS.values() if "fp8" in run.dtype
    }
    reasons = {run.row: why or refusal(run) for run, why in read_memory(DATA) if why or refusal(run)}
    assert sorted(reasons.values())[0] == "a closed form, not a measurement"
    assert any(reason.startswith("adapters") for reason in reasons.values())


def test_a_run_is_priced_as_the_search_prices_the_same_plan(pricer: Pricer) -> None:
    run, shape, cost = SMALL, shape_of(SMALL), cost_model_of(SMALL)
    assert cost is not None
    step = pricer.price(run).step
    assert step is not None
    traced = pricer.traced[shape]
    batch = traced.sg.graph.batch_size
    plan = plan_of(run, shape)
    request = Request(
        model="run", dtype="bfloat16", pp=run.pp, dp=run.dp, tp=run.tp, cp=1, microbatch=run.microbatch, data=plan.data,
        schedule="1f1b", precision=plan.precision, cuts=plan.edges[1:-1], forbid=("recompute=selective",), gap=0.0,
    )  # fmt: skip
    found = solve(traced.sg, cost.cluster, cost, request, profile_digest="")
    count = batch // (run.dp * run.microbatch)
    same = pricer.price(replace(run, global_batch=batch, recompute="none")).step
    assert same is not None and found.num_microbatches == count
    assert found.step.total == pytest.approx(same.total_us, rel=1e-9)
    assert same.total_us < pricer.price(replace(run, global_batch=batch)).step.total_us


def test_the_plan_is_what_the_row_says(pricer: Pricer) -> None:
    for run in RUNS.values():
        step = pricer.price(run).step
        if step is None:
            continue
        point = step.setting.point
        assert (point.tp, point.dp, point.microbatch) == (run.tp, run.dp, run.microbatch)
        assert (point.pp, point.chunks) == (run.pp, run.chunks) or run.source == "nanotron"
        assert point.num_microbatches * point.microbatch * point.dp == run.global_batch
        assert sum(len(stage.options) for stage in step.stages) == run.sizes.num_layers + 2
        layers = {option.recompute for stage in step.stages for option in stage.options if option.kind == 1}
        again = run.recompute == "none" and run.sequence_parallel and run.tp > 1
        assert layers == {"gather" if again else run.recompute}


def test_nanotron_splits_by_weights() -> None:
    run = next(run for run in RUNS.values() if run.source == "nanotron")
    edges = plan_of(run, shape_of(run)).edges
    assert edges[:3] == (0, 4, 6) and edges[-1] == 34  # three layers fill the first of 16 stages
    assert plan_of(run, shape_of(run)).pp == 15  # the head falls on the stage before the last, which stays empty


def test_a_tensor_axis_may_cross_nodes(pricer: Pricer) -> None:
    run = next(run for run in RUNS.values() if run.source == "nanotron")
    wide = replace(run, tp=16, pp=4)
    inside = replace(run, tp=8, pp=8)
    assert pricer.price(wide).step.amounts.by_cause[1][1] > pricer.price(inside).step.amounts.by_cause[1][1]


def test_rank_correlation_and_errors() -> None:
    assert spearman([(1, 10), (2, 20), (3, 30)]) == 1
    assert spearman([(1, 30), (2, 20), (3, 10)]) == -1
    assert spearman([(1, 1), (2, 1), (3, 1)]) == 0
    errors = errors_of([(90, 100), (120, 100)])
    assert errors is not None
    assert (errors.mean_abs, errors.bias) == (pytest.approx(0.15), pytest.approx(0.05))


def test_regret_is_what_the_predicted_best_loses(pricer: Pricer) -> None:
    priced = [pricer.price(run) for run in RUNS.values() if run.source == "vtrain_single"]
    assert len({one.run.group for one in priced}) == 1
    ranking = ranking_of(priced)
    chosen = min(priced, key=lambda one: one.step_s).run.step_s
    best = min(one.run.step_s for one in priced)
    assert ranking.regret == pytest.approx(chosen / best - 1)
    slow = min(priced, key=lambda one: one.step_s)
    worse = [replace(one, run=replace(one.run, step_s=100.0)) if one is slow else one for one in priced]
    assert ranking_of(worse).regret > 1


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "cost_accuracy.py"), "--data", str(DATA), "--json", str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    raw = json.loads(out.read_text(encoding="utf-8"))["raw"]
    assert {"korthikanti22", "vtrain_single", "nanotron", "internevo"} <= {row.get("source") for row in raw}
    for name in ("Step time", "Peak memory", "fp8, which the cost model does not price yet", "oom_or_crash"):
        assert name in printed
    rows = [row for row in raw if "predicted_s" in row and row["measured_s"]]
    assert len(rows) == sum(not refusal(run) for run in RUNS.values())
