"""check, recost and explain on a plan that was searched from the command line: words, exit codes, errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoplan.cli.main import make_app
from autoplan.plan.file import load_plan

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "nanogpt.py")


def run(*args: str):
    return CliRunner().invoke(make_app(), list(args))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("given") / "plan.json")
    found = run(
        "search", EXAMPLE, "--cluster", "4xH100", "--global-batch", "16", "--tp", "2", "--recompute", "none", "-o", path
    )
    assert found.exit_code == 0, found.stderr
    return path


def test_a_plan_is_good_for_its_own_model_and_cluster(plan_file):
    found = run("check", plan_file)
    assert found.exit_code == 0, found.stderr
    assert "legal    yes" in found.stdout
    assert "figures  those of today's cost model" in found.stdout
    assert "tp  1, 2, 4: they divide a node of 4 devices and 4 attention heads" in found.stdout
    as_json = json.loads(run("check", plan_file, EXAMPLE, "--cluster", "4xH100", "--json").stdout)
    assert (as_json["good"], as_json["illegal"]) == (True, [])


def test_another_number_of_devices_and_another_model_are_illegal_and_exit_1(plan_file, tmp_path):
    found = run("check", plan_file, "--cluster", "8xH100")
    assert found.exit_code == 1
    assert "legal  no: the plan is for 4 devices" in found.stdout
    other = tmp_path / "wider.py"
    other.write_text(Path(EXAMPLE).read_text().replace("width: int = 128", "width: int = 256"))
    found = run("check", plan_file, str(other))
    assert found.exit_code == 1
    assert "this model is another one" in found.stdout
    assert run("check", plan_file, "no_such_file.py").exit_code == 2


def test_an_edited_plan_is_illegal_where_it_cannot_run(plan_file, tmp_path):
    path = tmp_path / "edited.json"
    document = json.loads(Path(plan_file).read_text())
    name = next(name for name in document["parameters"] if name.endswith("c_fc.weight"))
    document["parameters"][name]["tp"] = "Shard(7)"
    path.write_text(json.dumps(document))
    found = run("check", str(path))
    assert found.exit_code == 1
    assert "needs a dim 7" in found.stdout


def test_figures_that_no_longer_hold_are_stale(plan_file, tmp_path):
    document = json.loads(Path(plan_file).read_text())
    document["profile_digest"] = "0" * 16
    path = tmp_path / "old.json"
    path.write_text(json.dumps(document))
    found = run("check", str(path))
    assert found.exit_code == 0, found.stderr
    assert "figures  stale, the hardware profile has changed since (0000000000000000)" in found.stdout


def test_recost_at_another_batch_and_cluster(plan_file, tmp_path):
    out = str(tmp_path / "twice.json")
    found = run("recost", plan_file, "--global-batch", "32", "--cluster", "8xH100", "-o", out)
    assert found.exit_code == 0, found.stderr
    assert "B  priced anew: 8xH100, 32 samples in " in found.stdout
    assert "priced elsewhere: dp: " in found.stdout
    twice, plan = load_plan(out), load_plan(plan_file)
    assert (twice.mesh.size("tp"), twice.mesh.size("dp")) == (2, 2 * plan.mesh.size("dp"))
    assert twice.proof.status == "priced"
    assert (twice.origin.cluster, twice.origin.model) == ("8xH100", EXAMPLE)
    assert run("check", out).exit_code == 0
    assert "priced as given, not searched" in run("report", out).stdout


def test_recost_of_itself_changes_nothing_but_the_proof(plan_file):
    [row] = json.loads(run("recost", plan_file, "--json").stdout)
    assert {entry["section"] for entry in row["differences"]} <= {"assumption"}
    assert row["step_us"] == load_plan(plan_file).step.total


def test_recost_on_several_clusters_and_what_cannot_be(plan_file):
    found = run("recost", plan_file, "--cluster", "4xA100-80GB", "--cluster", "4xL4")
    assert found.stdout.count("A  as searched: ") == 2
    for args, message in (
        (("--cluster", "3xH100"), "tp=2, which stays inside a node"),
        (("--seq-len", "32"), "example_inputs in"),
        (("--cluster", "4xH100", "--cluster", "8xH100", "-o", "x.json"), "-o takes one plan"),
        (("--global-batch", "5"), "does not divide into microbatches"),
    ):
        found = run("recost", plan_file, *args)
        assert (found.exit_code, found.stdout) == (2, "")
        assert message in found.stderr


def test_recost_at_another_length_traces_the_model_again(tmp_path):
    model = tmp_path / "longer.py"
    text = Path(EXAMPLE).read_text()
    start = text.index("def example_inputs")
    model.write_text(text[:start] + INPUTS)
    path = str(tmp_path / "plan.json")
    assert run("search", str(model), "--cluster", "2xH100", "--global-batch", "8", "-o", path).exit_code == 0
    found = run("recost", path, "--seq-len", "32")
    assert found.exit_code == 0, found.stderr
    assert "tokens in a step" in found.stdout and "-50.0%" in found.stdout


INPUTS = """def example_inputs(batch_size: int, seq_len: int = 64) -> dict[str, Tensor]:
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
    return {"idx": tokens, "targets": tokens}
"""


def test_explain_a_weight_a_module_and_a_stage(plan_file):
    found = run("explain", plan_file, "h.*.mlp.c_fc.weight")
    assert found.exit_code == 0, found.stderr
    assert found.stdout.startswith("weight h.*.mlp.c_fc.weight\n")
    assert "Alternatives, all else as in the plan" in found.stdout
    [row] = json.loads(run("explain", plan_file, "h.0.mlp.c_fc", "--json").stdout)[:1]
    assert row["subject"].startswith("op ")
    assert run("explain", plan_file, "stage 0").stdout.startswith("stage 0\n")


def test_explain_a_choice_searches_the_others(plan_file):
    [row] = json.loads(run("explain", plan_file, "data", "--json").stdout)
    assert row["terms"] == "all else searched anew"
    assert {entry["words"].partition(":")[0] for entry in row["alternatives"]} | {f"data={row['chosen']}"} == {
        "data=replicate", "data=zero1", "data=zero2", "data=shard",
    }  # fmt: skip


def test_an_unknown_name_has_near_matches_and_the_kinds_of_names(plan_file):
    found = run("explain", plan_file, "h.0.mlp.c_fc.wieght")
    assert (found.exit_code, found.stdout) == (2, "")
    assert "did you mean h.0.mlp.c_fc.weight" in found.stderr
    assert "A name is a weight" in found.stderr
    assert run("explain", plan_file, "stage 99").exit_code == 2
    assert run("explain", plan_file, "stage x").exit_code == 2


def test_a_plan_from_python_asks_for_its_model(plan_file, tmp_path):
    document = json.loads(Path(plan_file).read_text())
    document["origin"]["model"] = ""
    path = tmp_path / "python.json"
    path.write_text(json.dumps(document))
    found = run("check", str(path))
    assert found.exit_code == 2
    assert "does not say where its model is" in found.stderr
    assert run("check", str(path), EXAMPLE).exit_code == 0
