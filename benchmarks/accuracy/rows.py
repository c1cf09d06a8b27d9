"""Rows of ``throughput.csv`` and ``memory.csv`` -> ``Run``: one published run with what was measured of it."""

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "oom", "oom_or_crash"]
LEAST_UTILISATION = 0.15
"""Rows below are listed, and left out of the figures that are to be met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The architecture as a table gives it; 0 where it does not."""

    num_layers: int
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq_len: int
    params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row: what ran, how, and what was measured."""

    row: str
    source: str
    model: str
    sizes: Sizes
    gpu: str
    gpu_gib: float
    num_devices: int
    global_batch: int
    microbatch: int
    tp: int
    pp: int
    chunks: int
    cp: int
    ep: int
    level: str
    """How data ranks share states: zero0 to zero3."""
    sequence_parallel: bool
    recompute: str
    """none, selective, full, or nothing where it was not published."""
    dtype: str
    attention: str
    finetune: str
    notes: str
    grade: str = ""
    utilisation: float = 0.0
    step_s: float | None = None
    status: Status = "ok"
    peak_gib: float | None = None
    memory_kind: str = ""

    @property
    def dp(self) -> int:
        """Data-parallel ranks, as the devices leave them."""
        return self.num_devices // (self.tp * self.pp * self.cp)

    @property
    def num_microbatches(self) -> int:
        """Of one data rank in a step."""
        return self.global_batch // max(1, self.dp * self.microbatch)

    @property
    def group(self) -> tuple[object, ...]:
        """Runs of one job, of which the best plan could be asked."""
        return self.source, self.model, self.sizes.seq_len, self.gpu, self.num_devices, self.global_batch

    @property
    def is_judged(self) -> bool:
        """Whether it is among the rows that targets are about."""
        return self.utilisation >= LEAST_UTILISATION and self.grade in ("A", "B")

    @property
    def label(self) -> str:
        """The plan for people."""
        parts = [f"tp{self.tp}", f"pp{self.pp}" + (f"x{self.chunks}" if self.chunks > 1 else ""), f"dp{self.dp}"]
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [f"mb{self.microbatch}", f"m{self.num_microbatches}", self.level]
        parts += ["sp"] if self.sequence_parallel else []
        return " ".join([*parts, self.recompute])


def read_throughput(folder: Path) -> list[Run]:
    """The runs of ``throughput.csv``; none where there is no such file."""
    return [_throughput(row) for row in _rows(folder / "throughput.csv")]


def read_memory(folder: Path) -> list[tuple[Run, str]]:
    """The runs of ``memory.csv``, each with why its figure cannot be used, or nothing."""
    return [(_memory(row), _not_a_peak(row)) for row in _rows(folder / "memory.csv")]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _throughput(row: Mapping[str, str]) -> Run:
    return _run(
        row,
        attention=row["attention"],
        grade=row["grade"],
        utilisation=float(row["implied_util_6N_causal"] or 0),
        step_s=float(row["derived_step_s"]) if row["derived_step_s"] else None,
    )


def _memory(row: Mapping[str, str]) -> Run:
    return _run(
        row,
        finetune=row["finetune"],
        status=row["status"] if row["status"] in ("oom", "oom_or_crash") else "ok",
        peak_gib=float(row["peak_mem_gib"]) if row["peak_mem_gib"] else None,
        memory_kind=_kind(row["mem_kind"]),
    )


def _not_a_peak(row: Mapping[str, str]) -> str:
    if row["status"] == "formula_not_measured":
        return "a closed form, not a measurement"
    if row["status"] == "ok" and row["component"] not in ("", "peak total"):
        return f"not a peak: {row['component']}"
    return ""


def _kind(text: str) -> str:
    """Allocated, reserved or what the driver counts, as far as the words of a table tell."""
    words = text.lower()
    allocated, reserved = "allocated" in words, "reserved" in words
    if allocated and reserved:
        return "allocated or reserved"
    if allocated:
        return "allocated"
    if reserved:
        return "reserved"
    return "nvidia-smi" if "smi" in words else "not said"


def _run(row: Mapping[str, str], **measured: object) -> Run:
    common: dict[str, object] = {"attention": "", "finetune": "", **measured}
    return Run(
        row=row["row_id"],
        source=row["source_group"],
        model=row["model"],
        sizes=_sizes(row),
        gpu=row["gpu"],
        gpu_gib=float(row["gpu_mem_gb"] or 0),
        num_devices=_int(row, "n_gpus"),
        global_batch=_int(row, "global_batch"),
        microbatch=_int(row, "micro_batch"),
        tp=_int(row, "tp", 1),
        pp=_int(row, "pp", 1),
        chunks=_int(row, "vp", 1),
        cp=_int(row, "cp", 1),
        ep=_int(row, "ep", 1),
        level=row["fsdp_level"].strip(),
        sequence_parallel=row["sequence_parallel"].strip().lower() == "yes",
        recompute=row["recompute"].strip().lower(),
        dtype=row["dtype"].strip().lower(),
        notes=row["notes"],
        **common,  # type: ignore[arg-type]
    )


def _sizes(row: Mapping[str, str]) -> Sizes:
    heads = _int(row, "heads")
    return Sizes(
        num_layers=_int(row, "n_layers"),
        width=_int(row, "hidden"),
        hidden=_int(row, "ffn"),
        num_heads=heads,
        num_kv_heads=_int(row, "kv_heads", heads),
        vocab_size=_int(row, "vocab"),
        seq_len=_int(row, "seq_len"),
        params=_int(row, "params"),
    )


def _int(row: Mapping[str, str], key: str, default: int = 0) -> int:
    text = row.get(key, "").strip()
    return int(float(text)) if re.fullmatch(r"\d+(\.0*)?", text) else default
