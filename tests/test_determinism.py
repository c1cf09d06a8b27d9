"""Same inputs, same bytes: whatever the hash seed of the process and the order of the keys in a cluster file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NANOGPT = Path(__file__).parent.parent / "examples" / "nanogpt.py"
SEARCH = """
import sys
from autoplan.planning import search_source
model, cluster, plan = sys.argv[1:]
search_source(model, cluster=cluster, global_batch=16).save(plan)
"""
HEAD = ['profile = "A100-80GB"', 'name = "lab"', "nodes = 2", "devices_per_node = 2"]
TABLES = [
    ["[memory]", "capacity_mib = 20000"],
    ["[links.node]", "bandwidth_gb_per_s = 150", "latency_us = 4"],
    ["[links.network]", 'name = "two ports"', "bandwidth_gb_per_s = 20", "latency_us = 9"],
]


def _cluster(turned: bool) -> str:
    """A cluster file; turned, with its keys and tables in reverse."""
    if not turned:
        return "\n".join([*HEAD, *(line for table in TABLES for line in table)])
    return "\n".join([*reversed(HEAD), *(line for name, *keys in reversed(TABLES) for line in [name, *reversed(keys)])])


def _planned(folder: Path, seed: int, *, turned: bool) -> bytes:
    cluster, plan = folder / "cluster.toml", folder / f"plan-{seed}-{turned}.json"
    cluster.write_text(_cluster(turned))
    done = subprocess.run(
        [sys.executable, "-c", SEARCH, str(NANOGPT), str(cluster), str(plan)],
        env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return plan.read_bytes()


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("plans")
    return folder, _planned(folder, 0, turned=False)


@pytest.mark.parametrize(("seed", "turned"), [(1, False), (2, True)], ids=["another seed", "keys turned too"])
def test_plans_are_the_same_to_the_byte(first: tuple[Path, bytes], seed: int, turned: bool) -> None:
    folder, plan = first
    assert json.loads(plan)["stages"]
    assert _planned(folder, seed, turned=turned) == plan
