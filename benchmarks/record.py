"""What a benchmark result must hold beside its numbers, so that it can be repeated (see README.md)."""

import datetime
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("autoplan", "torch", "pulp", "highspy", "transformers")


def record(command: list[str], raw: list[dict[str, object]]) -> dict[str, object]:
    """The record of one benchmark run, made where and when it is run."""
    return {
        "command": " ".join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "hardware": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "raw": raw,
    }


def _commit() -> str:
    """Of this repository, with a note if its files were changed."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        changed = " with changes" if git("status", "--porcelain", "--untracked-files=no").strip() else ""
        return git("rev-parse", "--short=10", "HEAD").strip() + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
