"""Flags, exit codes and what is printed where; the search itself is replaced."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from plan.sample import sample_plan
from plan.wide_sample import wide_plan
from typer.testing import CliRunner

import autoplan
from autoplan.choices import Choices
from autoplan.cli.main import make_app
from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError, InputError
from autoplan.plan.file import load_plan, plan_json
from autoplan.plan.outcome import Least, Outcome, Tried

SEARCH = ["search", "model.py", "--cluster", "8xH100"]
COMMANDS = ("search", "report", "diff", "check", "recost", "explain")


H100 = Cluster(num_nodes=1, devices_per_node=2, device="H100", memory_bytes=2**36)


def run(*args):
    return CliRunner().invoke(make_app(), list(args))


@pytest.fixture
def api(monkeypatch):
    """Stands in for ``autoplan.planning``; ``calls`` holds what the command asked for, ``error`` is raised when set."""

    def search_source(spec, **options):
        fake.calls.append((spec, options))
        options["progress"]("tracing the model")
        if fake.error is not None:
            raise fake.error
        return fake.plan

    def search_clusters(spec, **options):
        fake.calls.append((spec, options))
        return fake.outcomes

    def search_least(spec, **options):
        fake.calls.append((spec, options))
        return Least(cluster=H100, tried=(Tried(cluster=H100, fits=True),)), fake.plan

    fake = types.ModuleType("autoplan.planning")
    fake.calls, fake.error, fake.plan, fake.outcomes = [], None, sample_plan(), ()
    fake.search_source, fake.search_clusters, fake.search_least = search_source, search_clusters, search_least
    monkeypatch.setitem(sys.modules, "autoplan.planning", fake)
    monkeypatch.setattr(autoplan, "planning", fake, raising=False)
    return fake


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_json(sample_plan()))
    return str(path)


FLAGS = {
    "global_batch": 64, "seq_len": 128, "dtype": "fp64", "optimizer": "sgd", "grad_dtype": "fp32",
    "reduce_dtype": "fp64", "state_dtype": "bf16", "master_dtype": "fp32", "pp": 2, "dp": 3, "cp": 6, "tp": 4,
    "ep": 7, "microbatch": 5, "recompute": "full", "schedule": "zbv", "chunks": 2, "data": "zero1", "shards": 9,
    "gap": 0.25, "top": 8,
}  # fmt: skip


def test_search_passes_every_flag(api, tmp_path):
    out = str(tmp_path / "plan.json")
    flags = [part for name, value in FLAGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = run(
        *SEARCH, *flags, "--time-limit", "7.5", "--cuts", "3, 5", "--offload", "--runnable", "--pin", "a=tp:Shard(0)",
        "--pin", "b=tp:Shard(1)", "--forbid", "tp=8", "--keep", "head", "-o", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    [(spec, options)] = api.calls
    del options["progress"]
    assert spec == "model.py"
    assert options == FLAGS | {
        "cluster": "8xH100", "time_limit_s": 7.5, "cuts": (3, 5), "offload": True, "runnable": True,
        "pins": ["a=tp:Shard(0)", "b=tp:Shard(1)"], "forbid": ["tp=8"], "keep": ["head"],
    }  # fmt: skip
    assert set(options) - {"cluster", "global_batch", "seq_len", "dtype"} == set(Choices.__annotations__)


def test_search_leaves_the_rest_open(api):
    assert run(*SEARCH).exit_code == 0
    [(_, options)] = api.calls
    assert {options[name] for name in (*FLAGS, "cuts") if name != "optimizer"} == {None}
    assert (options["optimizer"], options["time_limit_s"]) == ("adamw", 60.0)
    assert not any(options[name] for name in ("offload", "runnable", "pins", "forbid", "keep"))


@pytest.mark.parametrize("cuts", ["", "3;5", "a", "3,,5", "-1"])
def test_cuts_are_a_list_of_numbers(api, cuts):
    result = run(*SEARCH, "--cuts", cuts)
    assert (result.exit_code, api.calls) == (2, [])
    assert "write it as 12,24,36" in result.stderr


def test_search_adds_time_and_cost(api):
    result = run(*SEARCH, "--tokens", "1T", "--price", "2.5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(str(sample_plan()))
    assert "Training on 1,000,000,000,000 tokens at 2.5 a device-hour\n  time          3.39 days\n" in result.stdout
    assert "cost          device-hours x price = " in result.stdout
    as_json = run(*SEARCH, "--tokens", "1T", "--price", "2.5", "--json")
    assert json.loads(as_json.stdout)["model"] == sample_plan().model
    assert "Training on" in as_json.stderr


@pytest.mark.parametrize("flags", [["--tokens", "many"], ["--price", "0"], ["--price", "1", "--price", "2"]])
def test_a_wrong_budget_is_found_before_the_search(api, flags):
    assert run(*SEARCH, *flags).exit_code == 2
    assert not api.calls


def test_tokens_of_samples_without_a_sequence_lose_no_plan(api, tmp_path):
    api.plan = dataclasses.replace(sample_plan(), tokens=0)
    out = str(tmp_path / "plan.json")
    result = run(*SEARCH, "--tokens", "1T", "-o", out)
    assert result.exit_code == 2
    assert "have no sequence" in result.stderr
    assert load_plan(out) == api.plan


CLUSTERS = ["search", "model.py", "--cluster", "8xH100", "--cluster", "4x8xH100", "--cluster", "8xL4"]
L4 = Cluster(num_nodes=1, devices_per_node=8, device="L4", memory_bytes=20 * 2**30)


@pytest.fixture
def three(api):
    """Two clusters with a plan, and one on which nothing fits."""
    plans = [sample_plan(), wide_plan()]
    found = [Outcome(cluster=plan.cluster, plan=plan) for plan in plans]
    api.outcomes = (*found, Outcome(cluster=L4, reason="no plan fits 8xL4"))
    return api


def test_several_clusters_are_one_table_and_the_fastest_is_written(three, tmp_path):
    out = str(tmp_path / "plan.json")
    result = run(*CLUSTERS, "--tp", "2", "-o", out)
    assert result.exit_code == 0, result.stderr
    [(_, options)] = three.calls
    assert (options["clusters"], options["tp"]) == (("8xH100", "4x8xH100", "8xL4"), 2)
    assert result.stdout.startswith("3 clusters\n")
    assert result.stdout.endswith(f"\nThe plan of 8xH100, the fastest, was written to {out}\n")
    assert load_plan(out) == sample_plan()


def test_with_prices_the_cheapest_is_written(three, tmp_path):
    out = str(tmp_path / "plan.json")
    prices = ["--price", "100", "--price", "0.5", "--price", "1"]
    result = run(*CLUSTERS, *prices, "-o", out)
    assert result.stdout.endswith(f"\nThe plan of 4x8xH100, the cheapest, was written to {out}\n")
    assert load_plan(out) == wide_plan()
    assert run(*CLUSTERS, *prices[:4]).exit_code == 2


def test_several_clusters_as_json(three):
    result = run(*CLUSTERS, "--json")
    assert [row["cluster"] for row in json.loads(result.stdout)["rows"]] == ["8xH100", "4x8xH100", "8xL4"]


def test_no_cluster_with_a_plan_exits_3_and_writes_nothing(api, tmp_path):
    api.outcomes = tuple(Outcome(cluster=L4, reason="no plan fits 8xL4") for _ in range(3))
    result = run(*CLUSTERS, "-o", str(tmp_path / "plan.json"))
    assert result.exit_code == 3
    assert "no plan: no plan fits 8xL4" in result.stdout
    assert result.stderr.endswith("error: no plan fits any of the clusters\n")
    assert os.listdir(tmp_path) == []


def test_search_prints_the_plan_and_where_it_is(api, tmp_path):
    out = str(tmp_path / "plan.json")
    result = run(*SEARCH, "-o", out)
    assert result.stdout == f"{sample_plan()}\nThe plan was written to {out}\n"
    assert "tracing the model" in result.stderr
    assert load_plan(out) == sample_plan()


def test_search_without_output_says_how_to_keep_it(api):
    assert "add -o plan.json" in run(*SEARCH).stderr


def test_search_json_prints_json_only(api, tmp_path):
    result = run(*SEARCH, "--json", "-o", str(tmp_path / "plan.json"))
    assert json.loads(result.stdout)["model"] == sample_plan().model
    assert "was written to" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--pp", "0"],
        ["--tp", "two"],
        ["--dtype", "int8"],
        ["--recompute", "some"],
        ["--optimizer", "adam"],
        ["--time-limit", "0"],
        ["--chunks", "0"],
        ["--schedule", "gpipe"],
        ["--data", "zero3"],
        ["--top", "0"],
        ["--grad-dtype", "int8"],
        ["--batch", "8"],
    ],
)
def test_bad_flags_exit_2(api, flags):
    result = run(*SEARCH, *flags)
    assert result.exit_code == 2
    assert flags[0] in result.stderr
    assert not api.calls


def test_bad_input_exits_2_with_the_message(api):
    api.error = InputError("no file model.py: check the path")
    result = run(*SEARCH)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("error: no file model.py: check the path\n")


def test_infeasible_exits_3_with_the_figures_and_writes_nothing(api, tmp_path):
    api.error = InfeasibleError("no plan fits 1x8xL4\n  short by  9.79 GiB (10,512,345,678 bytes)")
    result = run(*SEARCH, "-o", str(tmp_path / "plan.json"))
    assert (result.exit_code, result.stdout) == (3, "")
    assert "error: no plan fits 1x8xL4\n  short by  9.79 GiB (10,512,345,678 bytes)\n" in result.stderr
    assert os.listdir(tmp_path) == []


def test_infeasible_without_figures_exits_3(api):
    api.error = InfeasibleError("tp 3 does not divide 4 heads")
    result = run(*SEARCH)
    assert result.exit_code == 3
    assert result.stderr.endswith("error: tp 3 does not divide 4 heads\n")


def test_interrupt_exits_130_and_leaves_no_file(api, tmp_path):
    api.error = KeyboardInterrupt()
    result = run(*SEARCH, "-o", str(tmp_path / "plan.json"))
    assert result.exit_code == 130
    assert os.listdir(tmp_path) == []


def test_a_bug_keeps_its_traceback_and_says_so(api):
    api.error = RuntimeError("broken")
    result = run(*SEARCH)
    assert result.exception is api.error
    assert "bug in autoplan" in api.error.__notes__[0]


def test_a_place_that_cannot_be_written_is_found_before_the_search(api, tmp_path):
    for path in (str(tmp_path), str(tmp_path / "none" / "plan.json")):
        result = run(*SEARCH, "-o", path)
        assert result.exit_code == 2
        assert f"cannot write {path}" in result.stderr
    assert not api.calls


def test_a_full_disk_exits_2(api, tmp_path, monkeypatch):
    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    result = run(*SEARCH, "-o", str(tmp_path / "plan.json"))
    assert result.exit_code == 2
    assert "plan.json: No space left on device" in result.stderr
    assert os.listdir(tmp_path) == []


def test_report_prints_words(plan_file):
    result = run("report", plan_file)
    assert result.exit_code == 0
    assert result.stdout.startswith(str(sample_plan()))


def test_report_writes_the_page(plan_file, tmp_path):
    page = tmp_path / "plan.html"
    result = run("report", plan_file, "--html", str(page))
    assert result.stdout.endswith(f"The page was written to {page}\n")
    assert page.read_text().startswith("<!doctype html>")


def test_report_adds_time_and_cost(plan_file, tmp_path):
    page = tmp_path / "plan.html"
    result = run("report", plan_file, "--tokens", "1T", "--price", "2.5", "--html", str(page))
    assert "\n\nTraining on 1,000,000,000,000 tokens at 2.5 a device-hour\n" in result.stdout
    assert "Training on 1,000,000,000,000 tokens" in page.read_text()
    as_json = run("report", plan_file, "--tokens", "1T", "--price", "2.5", "--json")
    assert json.loads(as_json.stdout)["bill"]["steps"] == 15_258_790  # 10**12 / 65,536, rounded up
    assert json.loads(run("report", plan_file, "--json").stdout)["bill"] is None


def test_report_json_is_json_only(plan_file, tmp_path):
    result = run("report", plan_file, "--json", "--html", str(tmp_path / "plan.html"))
    assert json.loads(result.stdout)["num_devices"] == 8


def test_report_on_a_broken_file_names_the_place(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text('{\n  "schema_version": 1,\n')
    result = run("report", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {path}: line ")


def test_report_on_a_missing_file(tmp_path):
    result = run("report", str(tmp_path / "none.json"))
    assert result.exit_code == 2
    assert "No such file" in result.stderr


def test_report_page_that_cannot_be_written(plan_file, tmp_path):
    result = run("report", plan_file, "--html", str(tmp_path / "none" / "plan.html"))
    assert result.exit_code == 2
    assert "cannot write" in result.stderr


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_has_an_example(command):
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert f"autoplan {' '.join(command)}".strip() in result.stdout.split("Examples:")[1]


def test_version():
    assert run("--version").stdout == f"autoplan {importlib.metadata.version('autoplan')}\n"


def test_help_does_not_load_torch():
    code = "import sys, autoplan.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


WHOLE = all(importlib.util.find_spec(name) for name in ("autoplan.planning", "autoplan.solver.solve"))
END_TO_END = pytest.mark.skipif(not WHOLE, reason="autoplan.planning or the solver is not there yet")
EXAMPLE = str(Path(__file__).parents[2] / "examples" / "nanogpt.py")


@END_TO_END
def test_search_then_report_for_real(tmp_path):
    out = str(tmp_path / "plan.json")
    result = run("search", EXAMPLE, "--cluster", "8xH100", "--global-batch", "16", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert str(load_plan(out)) in result.stdout
    assert run("report", out, "--html", str(tmp_path / "plan.html")).exit_code == 0


@END_TO_END
@pytest.mark.parametrize(
    ("args", "codes"),
    [
        (["no_such_file.py", "--cluster", "8xH100"], {2}),
        ([EXAMPLE, "--cluster", "8xNoSuchGPU"], {2}),
        ([EXAMPLE, "--cluster", "8xH100", "--tp", "3"], {2, 3}),
        ([EXAMPLE, "--cluster", "8xH100", "--global-batch", "7", "--dp", "2"], {2, 3}),
    ],
)
def test_wrong_input_for_real(args, codes):
    result = run("search", *args)
    assert result.exit_code in codes, result.stderr
    assert "error: " in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_search_for_the_fewest_devices_prints_what_was_tried_before_the_plan(api, tmp_path):
    out = str(tmp_path / "plan.json")
    result = run(*SEARCH, "--min-devices", "--tp", "2", "-o", out)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("The fewest devices on which it fits: 2 devices (2xH100)\n")
    assert str(sample_plan()) in result.stdout
    [(_, options)] = api.calls
    assert (options["cluster"], options["tp"]) == ("8xH100", 2)
    as_json = run(*SEARCH, "--min-devices", "--json")
    assert json.loads(as_json.stdout)["model"] == sample_plan().model
    assert "The fewest devices" in as_json.stderr
    assert run(*SEARCH, "--min-devices", "--cluster", "8xL4").exit_code == 2


def test_diff_follows_diff(plan_file, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(plan_json(dataclasses.replace(sample_plan(), offload=True)))
    alike = run("diff", plan_file, plan_file)
    assert (alike.exit_code, alike.stdout.splitlines()[-1]) == (0, "The plans are alike.")
    different = run("diff", plan_file, str(other))
    assert different.exit_code == 1
    assert "optimizer states in host memory" in different.stdout
    trouble = run("diff", plan_file, str(tmp_path / "none.json"))
    assert (trouble.exit_code, trouble.stdout) == (2, "")


def test_diff_as_json(plan_file, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(plan_json(dataclasses.replace(sample_plan(), offload=True)))
    result = run("diff", plan_file, str(other), "--json")
    assert result.exit_code == 1
    assert [row["name"] for row in json.loads(result.stdout)["differences"]] == ["offload"]
