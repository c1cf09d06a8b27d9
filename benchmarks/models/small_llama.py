"""A Llama that trains on processors: ``examples/llama.py`` with 3.2 million parameters."""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
from llama import Config, Llama  # noqa: E402 (the examples are single files, not a package)


def build_model() -> nn.Module:
    return Llama(Config(
        vocab_size=512, block_size=128, num_layers=4, num_heads=4, num_kv_heads=4, width=256, hidden=704,
    ))  # fmt: skip


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    tokens = torch.arange(batch_size * 128).view(batch_size, 128) % 512
    return {"idx": tokens, "targets": tokens}
