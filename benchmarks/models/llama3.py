"""The Llama 3 models in plain PyTorch, built from ``examples/llama.py``: what runs outside transformers train.

Each ``build_`` function is one model: ``autoplan search benchmarks/models/llama3.py:build_8b --seq-len 8192 ...``.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from llama import Config, Llama  # noqa: E402 (the examples are single files, not a package)


def build_8b() -> nn.Module:
    return _llama3(num_layers=32, num_heads=32, width=4096, hidden=14336)


def build_70b() -> nn.Module:
    return _llama3(num_layers=80, num_heads=64, width=8192, hidden=28672)


def build_405b() -> nn.Module:
    return _llama3(num_layers=126, num_heads=128, width=16384, hidden=53248)


def example_inputs(batch_size: int, seq_len: int = 8192) -> dict[str, Tensor]:
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
    return {"idx": tokens, "targets": tokens}


def _llama3(num_layers: int, num_heads: int, width: int, hidden: int) -> nn.Module:
    """A column of table 3 of the Llama 3 paper, with positions for its longest training sequences."""
    return Llama(Config(
        vocab_size=128256, block_size=131072, num_layers=num_layers, num_heads=num_heads, num_kv_heads=8, width=width,
        hidden=hidden, rope_theta=500000.0,
    ))  # fmt: skip
