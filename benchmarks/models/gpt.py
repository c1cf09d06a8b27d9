"""GPT-2 124M, and the GPT models of the Megatron-LM paper, built from ``examples/nanogpt.py``.

Each ``build_`` function is one model: ``autoplan search benchmarks/models/gpt.py:build_145b --seq-len 2048 ...``.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from nanogpt import GPT, Config  # noqa: E402 (the examples are single files, not a package)


def build_model() -> nn.Module:
    """GPT-2 small, 124 million parameters: Radford et al. (2019), with the sizes of its released weights."""
    return GPT(Config(vocab_size=50257, block_size=1024, num_layers=12, num_heads=12, width=768))


def build_145b() -> nn.Module:
    return _megatron(num_layers=80, num_heads=96, width=12288)


def build_310b() -> nn.Module:
    return _megatron(num_layers=96, num_heads=128, width=16384)


def build_530b() -> nn.Module:
    return _megatron(num_layers=105, num_heads=128, width=20480)


def build_1t() -> nn.Module:
    return _megatron(num_layers=128, num_heads=160, width=25600)


def example_inputs(batch_size: int, seq_len: int = 1024) -> dict[str, Tensor]:
    tokens = torch.zeros(batch_size, seq_len, dtype=torch.long)
    return {"idx": tokens, "targets": tokens}


def _megatron(num_layers: int, num_heads: int, width: int) -> nn.Module:
    """A row of table 1 of Narayanan et al. (SC21): 2,048 positions, the vocabulary of GPT-2 padded to 51,200."""
    return GPT(Config(vocab_size=51200, block_size=2048, num_layers=num_layers, num_heads=num_heads, width=width))
