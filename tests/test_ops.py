"""``report --ops``: every op opened, by the same work and the same formula that priced the plan."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from autoplan import examine
from autoplan.cli.main import make_app
from autoplan.cost_models import ProfileCostModel, load_cluster
from autoplan.plan.file import save_plan
from autoplan.plan.plan import Plan
from autoplan.planning import search_source
from autoplan.profiler.model_ops import model_cases
from autoplan.report.ops import ops_text

LLAMA = Path(__file__).parent.parent / "examples" / "llama.py"


def planned(**pins: object) -> Plan:
    return search_source(str(LLAMA), cluster="8xH100", global_batch=64, **pins)  # type: ignore[arg-type]


def num_parameters() -> int:
    build = runpy.run_path(str(LLAMA))["build_model"]
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def passes_us(plan: Plan) -> float:
    """Of all ops in all stages of one pipeline, all microbatches."""
    layouts = {layout.name: layout.cost for layout in plan.layouts}
    names = [name for stage in plan.stages for name in stage.layouts]
    return plan.num_microbatches * sum(layouts[name].forward_us + layouts[name].backward_us for name in names)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("microbatch", [1, 8])
def test_ops_add_up_to_the_compute_of_the_plan(recompute: str, microbatch: int):
    plan = planned(tp=1, pp=1, recompute=recompute, microbatch=microbatch)
    ops = examine.ops(plan)
    assert sum(op.total_us for op in ops) == pytest.approx(dict(plan.step)["compute"], rel=1e-9)
    assert {op.during for op in ops} >= ({"again"} if recompute != "none" else {"forward", "backward"})
    assert any(op.op == "accumulate" for op in ops) is (plan.num_microbatches > 1)


def test_ops_of_all_stages_are_there_and_every_gradient_is_added_once():
    plan = planned(tp=1, pp=2, dp=4, data="replicate", microbatch=2)
    adding = [op for op in examine.ops(plan) if op.op == "accumulate"]
    rest = [op for op in examine.ops(plan) if op.op != "accumulate"]
    assert sum(op.total_us for op in rest) == pytest.approx(passes_us(plan), rel=1e-9)
    assert sum(op.count * op.flops for op in adding) == plan.num_microbatches * num_parameters()
    assert plan.num_microbatches > 1


def test_an_op_that_was_measured_says_so_and_still_adds_up(tmp_path: Path):
    cluster, profile = load_cluster("8xH100")
    cost = ProfileCostModel(cluster=cluster, profile=profile)
    cases = model_cases(str(LLAMA), cluster, cost, global_batch=64, seq_len=None, told=lambda _: None)
    file = tmp_path / "here.toml"
    times = "\n".join(f"{json.dumps(str(case.call))} = 123.0" for case in cases if "aten.linear" in case.key)
    file.write_text(
        f'nodes = 1\ndevices_per_node = 8\nprofile = "H100"\n[measured]\ndate = 2026-12-01\n[measured.ops]\n{times}'
    )
    plan = search_source(str(LLAMA), cluster=str(file), global_batch=64, tp=1, pp=1, microbatch=2)
    ops = examine.ops(plan)
    assert sum(op.total_us for op in ops) == pytest.approx(dict(plan.step)["compute"], rel=1e-9)
    measured = [op for op in ops if op.estimate.source == "this op at this shape, measured 2026-12-01"]
    assert {op.estimate.time_us for op in measured} == {123.0}
    assert measured == [op for op in ops if op.op == "aten.linear.default"]


def test_ops_are_opened_worst_first_and_below_the_peak():
    ops = examine.ops(planned(tp=2))
    totals = [op.total_us for op in ops]
    assert totals == sorted(totals, reverse=True)
    assert all(0 < op.estimate.efficiency <= 1 for op in ops)
    assert all(op.flops >= 0 and op.num_bytes > 0 and op.count > 0 for op in ops)
    assert {op.estimate.limit for op in ops} >= {"launch"}
    assert all(op.estimate.source.startswith("compute.") for op in ops)


def test_words_name_the_rest_and_the_sources():
    plan = planned(tp=1)
    text = ops_text(plan, examine.ops(plan), most=3)
    assert "more take" in text
    assert "Sources" in text
    assert "compute.host_us, " in text


def test_the_command_lists_ops(tmp_path: Path):
    file = tmp_path / "plan.json"
    save_plan(planned(tp=1), str(file))
    found = CliRunner().invoke(make_app(), ["report", str(file), "--ops", "--json"])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.stdout)
    assert {"op", "where", "flops", "num_bytes", "estimate", "count", "total_us"} <= set(rows[0])
    refused = CliRunner().invoke(make_app(), ["report", str(file), "--ops", "--tokens", "1T"])
    assert refused.exit_code == 2
    assert "--ops is a list of its own" in refused.output
