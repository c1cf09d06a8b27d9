"""Fit the curves of a profile on tables of kernel times: the script that the numbers of the profiles come from.

Reads ``matmul.csv``, ``attention.csv``, ``elementwise.csv`` and ``collectives.csv`` in a folder; prints, by device and
source, the share of the peak and the half size that leave the least mean error, and that error::

    python benchmarks/fit_kernels.py --data FOLDER

Training runs play no part here.
"""

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from autoplan.cost_models import load_profile

LEAST_ROWS = 256
"""Of a matmul: fewer are inference."""
FULL_HEADS = 32
"""Of an attention kernel: fewer, at one sample, leave processors idle."""
WAYS = ("sdp_fwd", "sdp_bwd")
SHARES = [0.4 + 0.01 * step for step in range(60)]
HALVES = [0.5e9, 1e9, 1.5e9, 2e9, 3e9, 4e9, 5e9, 6e9, 8e9, 12e9]
DEVICES = {
    "A100-80GB-SXM": "A100-80GB",
    "A100-80GB-PCIe": "A100-80GB",
    "H100-80GB-SXM": "H100",
    "H200-141GB-SXM": "H200",
}
"""As tables call them, and their profiles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One measured kernel."""

    device: str
    source: str
    flops: float
    num_bytes: float
    time_us: float


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with the tables of kernel times")
    folder = Path(parser.parse_args().data)
    for name, read in (("matmul", _matmuls), ("attention", _attentions)):
        for (device, source), kernels in _grouped(read(folder)).items():
            error, share, half = fit_curve(kernels, DEVICES[device])
            fitted = f"efficiency {share:.2f}  half {half / 1e6:6.0f} MFLOP  mean error {100 * error:4.1f} %"
            print(f"{name:10} {device:16} {source:24} {len(kernels):5}  {fitted}")
    for line in _both_ways(folder):
        print(line)
    for (device, op), kernels in _grouped(_elementwise(folder)).items():
        bandwidth = load_profile(DEVICES[device]).memory_bytes_per_us
        share = median(kernel.num_bytes / kernel.time_us / bandwidth for kernel in kernels if kernel.num_bytes > 3e7)
        print(f"{'memory':10} {device:16} {op:24} {len(kernels):5}  efficiency {share:.2f}  beyond 30 MB")


def fit_curve(kernels: Sequence[Kernel], profile_name: str) -> tuple[float, float, float]:
    """Mean error of the logarithm, share of the peak and half size of the best curve."""
    profile = load_profile(profile_name)
    peak = dict(profile.peak_flops_per_us)["bfloat16"]

    def error(share: float, half: float) -> float:
        return mean(
            abs(math.log(_time_us(k, share, half, peak, profile.memory_bytes_per_us) / k.time_us)) for k in kernels
        )

    return min((error(share, half), share, half) for share in SHARES for half in HALVES)


def _time_us(kernel: Kernel, share: float, half: float, peak: float, bandwidth: float) -> float:
    return max((kernel.flops + half) / (peak * share), kernel.num_bytes / (0.85 * bandwidth))


def _grouped(kernels: Iterable[Kernel]) -> dict[tuple[str, str], list[Kernel]]:
    found: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        if kernel.device in DEVICES:
            found[kernel.device, kernel.source].append(kernel)
    return {key: some for key, some in sorted(found.items()) if len(some) > 5}


def _matmuls(folder: Path) -> Iterator[Kernel]:
    for row in _rows(folder / "matmul.csv"):
        m, n, k = (float(row[key]) for key in "mnk")
        if m >= LEAST_ROWS and ("bf16" in row["dtype"] or "fp16" in row["dtype"]):
            flops = 2 * m * n * k
            moved = 2 * (m * n + n * k + m * k)
            yield _kernel(row, flops, moved, flops / (float(row["tflops"]) * 1e6))


def _attentions(folder: Path) -> Iterator[Kernel]:
    """Forward kernels that count half of the scores; they move next to nothing."""
    for row in _rows(folder / "attention.csv"):
        if "causal half count" in row["notes"] and row["time_ms"]:
            time_us = float(row["time_ms"]) * 1e3
            yield _kernel(row, float(row["tflops"]) * 1e6 * time_us, 0.0, time_us)


def _both_ways(folder: Path) -> Iterator[str]:
    """Shares of the peak by attention kernels timed forward and backward, counting half of the scores.

    Backward does 2.5 times the operations of forward. Of tables that count whole squares, the rows of a usual head size
    on a full device; of tables that time both together, every row.
    """
    rows = [row for row in _rows(folder / "attention.csv") if row["gpu"] in DEVICES]
    for device in dict.fromkeys(row["gpu"] for row in rows):
        peak = dict(load_profile(DEVICES[device]).peak_flops_per_us)["bfloat16"] / 1e6
        mine = [row for row in rows if row["gpu"] == device]
        usual = [row for row in mine if "full-square" in row["notes"] and row["v_head_dim"] == row["qk_head_dim"]]
        usual = [row for row in usual if int(row["heads"]) >= FULL_HEADS]
        there, back = ([float(row["tflops"]) / 2 / peak for row in usual if row["pass"] == way] for way in WAYS)
        if there and back:
            both = 3.5 / (1 / mean(there) + 2.5 / mean(back))
            shares = f"forward {mean(there):.2f}  backward {mean(back):.2f}  both {both:.2f}"
            yield f"{'attention':10} {device:16} {_source(usual[0]):24} {len(usual):5}  {shares}"
        for row in mine:
            if row["pass"].startswith("in-step attention fwd+bwd"):
                share = float(row["tflops"]) / peak
                yield f"{'attention':10} {device:16} {_source(row):24} {1:5}  both {share:.2f}  in a step"


def _elementwise(folder: Path) -> Iterator[Kernel]:
    passes: dict[str, Callable[[float, float], float]] = {
        "add": lambda wide, inner: 3 * wide,
        "mlp_act": lambda wide, inner: 3 * inner,
        "input_layernorm": lambda wide, inner: 2 * wide,
        "attn_rope": lambda wide, inner: 4 * wide,
    }
    for row in _rows(folder / "elementwise.csv"):
        if row["op"] not in passes or row["tp"] != "1":
            continue
        tokens = float(row["num_tokens"])
        values = passes[row["op"]](tokens * float(row["hidden"]), tokens * float(row["ffn"]))
        time_us = float(row["time_ms_median"]) * 1e3
        yield Kernel(device=row["gpu"], source=row["op"], flops=0.0, num_bytes=2 * values, time_us=time_us)


def _kernel(row: dict[str, str], flops: float, num_bytes: float, time_us: float) -> Kernel:
    return Kernel(device=row["gpu"], source=_source(row), flops=flops, num_bytes=num_bytes, time_us=time_us)


def _source(row: dict[str, str]) -> str:
    return row["source"].partition("@")[0].rpartition("/")[2]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
