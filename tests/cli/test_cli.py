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
from typer.testing import CliRunner

import autoplan
from autoplan.cli.main import app
from autoplan.errors import InfeasibleError, InputError
from autoplan.plan.file import load_plan, plan_json

SEARCH = ["search", "model.py", "--cluster", "8xH100"]


def run(*args):
    return CliRunner().invoke(app, list(args))


@pytest.fixture
def api(monkeypatch):
    """Stands in for ``autoplan.planning``; ``calls`` holds what the command asked for, ``error`` is raised when set."""

    def search_source(spec, **options):
        fake.calls.append((spec, options))
        options["progress"]("tracing the model")
        if fake.error is not None:
            raise fake.error
        return sample_plan()

    fake = types.ModuleType("autoplan.planning")
    fake.calls, fake.error, fake.search_source = [], None, search_source
    monkeypatch.setitem(sys.modules, "autoplan.planning", fake)
    monkeypatch.setattr(autoplan, "planning", fake, raising=False)
    return fake


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_json(sample_plan()))
    return str(path)


def test_search_passes_every_flag(api, tmp_path):
    flags = "--global-batch 64 --seq-len 128 --dtype fp64 --optimizer sgd --pp 2 --dp 3 --tp 4 --microbatch 5"
    out = str(tmp_path / "plan.json")
    result = run(*SEARCH, *flags.split(), "--recompute", "full", "--time-limit", "7.5", "-o", out)
    assert result.exit_code == 0, result.stderr
    [(spec, options)] = api.calls
    del options["progress"]
    assert spec == "model.py"
    assert options == {
        "cluster": "8xH100", "global_batch": 64, "seq_len": 128, "dtype": "fp64", "optimizer": "sgd",
        "pp": 2, "dp": 3, "tp": 4, "microbatch": 5, "recompute": "full", "time_limit_s": 7.5,
    }  # fmt: skip


def test_search_leaves_the_rest_open(api):
    assert run(*SEARCH).exit_code == 0
    [(_, options)] = api.calls
    open_choices = ("global_batch", "seq_len", "dtype", "pp", "dp", "tp", "microbatch", "recompute")
    assert {options[name] for name in open_choices} == {None}
    assert (options["optimizer"], options["time_limit_s"]) == ("adamw", 60.0)


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


@pytest.mark.parametrize("command", [[], ["search"], ["report"], ["diff"]])
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
