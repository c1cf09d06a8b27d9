"""``report --ops``: every op opened, by the same work and the same formula that priced the plan."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoplan import examine
from autoplan.cli.main import make_app
from autoplan.plan.file import save_plan
from autoplan.plan.plan import Plan
from autoplan.planning import search_source
from autoplan.report.ops import ops_text

LLAMA = Path(__file__).parent.parent / "examples" / "llama.py"


def planned(**pins: object) -> Plan:
    return search_source(str(LLAMA), cluster="8xH100", global_batch=64, **pins)  # type: ignore[arg-type]


def compute_us(plan: Plan) -> float:
    """All stages of one pipeline, all microbatches."""
    layouts = {layout.name: layout.cost for layout in plan.layouts}
    names = [name for stage in plan.stages for name in stage.layouts]
    return plan.num_microbatches * sum(layouts[name].forward_us + layouts[name].backward_us for name in names)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_ops_add_up_to_the_compute_of_the_plan(recompute: str):
    plan = planned(tp=1, pp=2, recompute=recompute)
    ops = examine.ops(plan)
    assert sum(op.total_us for op in ops) == pytest.approx(compute_us(plan), rel=1e-9)
    assert {op.during for op in ops} >= ({"again"} if recompute != "none" else {"forward", "backward"})


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
