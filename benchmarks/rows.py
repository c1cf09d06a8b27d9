"""The rows of the search benchmark: what is planned for which cluster, and what it may take."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
MODELS = "benchmarks/models"
"""From ``ROOT``, where searches are run."""
Doubled = Literal["layers", "devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One search. Limits are targets to compare with, not what the search is told."""

    name: str
    model: str
    """As ``autoplan search`` takes it, run in ``ROOT``."""
    nodes: int
    node: str
    """Devices of a node, as in ``8xH100``."""
    global_batch: int
    seq_len: int
    limit_s: float
    """From the start of the process to the plan on disk."""
    limit_gap: float
    """Share of the step by which the optimum of the cost model may be better."""
    limit_bytes: int = 3 * 10**9
    doubled: Doubled | None = None
    base: str = ""
    """The row that this one doubles."""

    @property
    def cluster(self) -> str:
        return f"{self.nodes}x{self.node}"


def _config(name: str) -> str:
    return f"{MODELS}/{name}/config.json"


def _row(name: str, model: str, cluster: str, shape: tuple[int, int], limit_s: float, limit_gap: float) -> Row:
    nodes, _, node = cluster.partition("x")
    batch, seq_len = shape
    return Row(
        name=name, model=model, nodes=int(nodes), node=node, global_batch=batch, seq_len=seq_len, limit_s=limit_s,
        limit_gap=limit_gap,
    )  # fmt: skip


ROWS = (
    _row("gpt2", f"{MODELS}/gpt.py", "1x8xA100-80GB", (512, 1024), 5, 0.01),
    _row("llama-3-8b", _config("llama-3-8b"), "8x8xH100", (1024, 8192), 10, 0.01),
    _row("llama-3-70b", _config("llama-3-70b"), "128x8xH100", (1024, 8192), 20, 0.01),
    _row("llama-3.1-405b", _config("llama-3.1-405b"), "2048x8xH100", (2048, 8192), 45, 0.01),
    _row("mixtral-8x22b", _config("mixtral-8x22b"), "64x8xH100", (1024, 8192), 30, 0.03),
    _row("deepseek-v3", _config("deepseek-v3"), "256x8xH800", (4096, 4096), 60, 0.03),
)
SCALING = ("llama-3-8b+layers", "llama-3-8b+devices", "llama-3-70b+layers", "llama-3-70b+devices")
"""Rows of ``--scaling``: a row of the table with its layers or its devices doubled."""


def find_row(name: str, folder: Path) -> Row:
    """The row of that name, ``NAME+layers`` and ``NAME+devices`` included; changed models are written to ``folder``.

    Raises ValueError with the names there are.
    """
    base_name, _, doubled = name.partition("+")
    base = next((row for row in ROWS if row.name == base_name), None)
    if base is None or doubled not in ("", "layers", "devices"):
        known = ", ".join(row.name for row in ROWS)
        raise ValueError(f"there is no row {name!r}; use {known}, each also with +layers or +devices")
    if doubled == "devices":
        return replace(base, name=name, nodes=2 * base.nodes, doubled="devices", base=base.name)
    if doubled == "layers":
        return replace(base, name=name, model=_twice_as_deep(base, folder), doubled="layers", base=base.name)
    return base


def _twice_as_deep(row: Row, folder: Path) -> str:
    """A copy of the row's config with twice the layers."""
    if not row.model.endswith(".json"):
        raise ValueError(f"{row.name} has no config whose layers could be doubled; choose another row")
    config = json.loads((ROOT / row.model).read_text(encoding="utf-8"))
    config["num_hidden_layers"] *= 2
    path = folder / f"{row.name}-twice" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)
