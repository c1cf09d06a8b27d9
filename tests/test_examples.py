"""The examples as a user runs them: the demo plans, reports and trains under torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.multiproc
@pytest.mark.timeout(500)
def test_the_demo_runs_and_its_losses_agree(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--steps", "3", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Plan for nanogpt.py:build_model on 8xH100" in done.stdout
    assert "largest difference of the losses" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"plan-8xH100.json", "plan-8xH100.html", "plan-2xcpu.json"}
