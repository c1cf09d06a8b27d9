"""Models of three to six segments, traced once: small to plan, with weights of megabytes.

Megabytes matter: the solver takes a few kilobytes off the memory for its tolerance.
"""

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoplan.ir import SegmentedGraph
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import llama  # noqa: E402  the examples are no package
import nanogpt  # noqa: E402

BATCH = 8
_WIDTH, _LENGTH = 256, 16


class _Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, inner)
        self.down = nn.Linear(inner, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Stack(nn.Module):
    """Layers of the given inner widths, one after the other."""

    def __init__(self, *inner: int) -> None:
        super().__init__()
        self.embed = nn.Linear(64, _WIDTH)
        self.layers = nn.ModuleList(map(_Block, inner))
        self.head = nn.Linear(_WIDTH, 512)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).mean()


def _stack(*inner: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return _Stack(*inner), {"x": torch.zeros(BATCH, _LENGTH, 64)}


def _tokens() -> Tensor:
    return torch.zeros(BATCH, _LENGTH, dtype=torch.int64)


def _nanogpt() -> tuple[nn.Module, dict[str, Tensor]]:
    config = nanogpt.Config(vocab_size=512, block_size=_LENGTH, num_layers=2, num_heads=4, width=128)
    return nanogpt.GPT(config), {"idx": _tokens(), "targets": _tokens()}


def _llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = llama.Config(vocab_size=512, block_size=_LENGTH, num_layers=2, num_heads=4, num_kv_heads=2, width=128)
    return llama.Llama(config), {"idx": _tokens(), "targets": _tokens()}


def _mixtral() -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.MixtralConfig(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=128,
        vocab_size=512, max_position_embeddings=_LENGTH, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config), {"input_ids": _tokens(), "labels": _tokens()}


MODELS: Mapping[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "even": lambda: _stack(512, 512, 512),
    "mixed": lambda: _stack(512, 1536, 512),
    "tapered": lambda: _stack(512, 512, 1536, 512),
    "nanogpt": _nanogpt,
    "llama": _llama,
    "mixtral": _mixtral,
}


@cache
def small_model(name: str) -> SegmentedGraph:
    """One of ``MODELS``, as a chain."""
    return segment_graph(trace_model(*MODELS[name]()).graph)
