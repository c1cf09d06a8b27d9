"""``autoplan profile`` from flags to the cluster file, with the ranks it starts itself."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoplan.cli.main import make_app
from autoplan.cost_models import load_cluster
from autoplan.profiler import profile as profiler

MODEL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x).square().mean()

def build_model():
    return Small()

def example_inputs(batch_size):
    return {"x": torch.zeros(batch_size, 8)}
"""


def test_two_ranks_are_started_measured_and_resumed(tmp_path: Path) -> None:
    model, file = tmp_path / "small.py", tmp_path / "local.toml"
    model.write_text(MODEL)
    words = ["profile", "--ranks", "2", "--quick", "--model", str(model), "--global-batch", "4", "-o", str(file)]
    done = CliRunner().invoke(make_app(), words)
    assert done.exit_code == 0, done.output
    cluster, profile = load_cluster(str(file))
    assert str(cluster) == "2xcpu"
    kinds = {(curve.kind.value, curve.ranks) for curve in profile.measured.collectives}
    assert kinds == {
        (kind, 2) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
    }
    assert any(text.startswith("aten.linear.default") and "grads" in text for text, _ in profile.measured.ops)
    assert {source.kind for key, source in profile.sources if key == "compute.launch_us"} == {"measured"}
    measured = (tmp_path / "local.toml.measured").read_text()
    assert all(json.loads(line)["us"] != 0 for line in measured.splitlines())
    assert sum("beside" in line for line in measured.splitlines()) == 3
    assert 0 < profile.overlap_loss < 1 and dict(profile.sources)["collectives.overlap_loss"].kind == "measured"
    again = CliRunner().invoke(make_app(), words)
    assert again.exit_code == 0 and (tmp_path / "local.toml.measured").read_text() == measured
    assert load_cluster(str(file))[1] == profile


def test_an_interrupted_run_writes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = profiler.run

    def some(asked: profiler.Asked, cases: tuple[profiler.Case, ...], told: profiler.Told) -> None:
        whole(asked, cases[:1], told)
        raise KeyboardInterrupt

    monkeypatch.setattr(profiler, "run", some)
    file = tmp_path / "local.toml"
    done = CliRunner().invoke(make_app(), ["profile", "--quick", "--device", "cpu", "-o", str(file)])
    assert done.exit_code == 130
    sources = dict(load_cluster(str(file))[1].sources)
    assert sources["compute.launch_us"].text.startswith("autoplan profile")
    assert "autoplan profile" not in sources["compute.matmul_efficiency"].text


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    file = str(tmp_path / "local.toml")
    assert CliRunner().invoke(make_app(), ["profile", "--ranks", "2", "--device", "cuda", "-o", file]).exit_code == 2
    assert CliRunner().invoke(make_app(), ["profile", "-o", str(tmp_path / "no" / "x.toml")]).exit_code == 2
