"""A small Llama in plain PyTorch: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, untied head.

Nothing in this file knows about parallelism. ``autoplan search examples/llama.py --cluster 8xH100`` plans it;
``examples/train.py`` trains it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocab_size: int = 256
    block_size: int = 64
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    width: int = 128
    hidden: int = 352
    rope_theta: float = 10000.0
    eps: float = 1e-5


class RMSNorm(nn.Module):
    """Scale to a root mean square of one, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.type_as(x) * self.weight


def rotary_table(config: Config) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and channel, each (block_size, head)."""
    head = config.width // config.num_heads
    frequency = config.rope_theta ** (-torch.arange(0, head, 2).float() / head)
    angle = torch.outer(torch.arange(config.block_size).float(), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to (batch, heads, time, head)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Give every query head its key or value head: (batch, kv, time, head) -> (batch, kv * times, time, head)."""
    B, K, T, H = x.shape
    return x[:, :, None].expand(B, K, times, T, H).reshape(B, K * times, T, H)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head = config.width // config.num_heads
        self.wq = nn.Linear(config.width, config.num_heads * self.head, bias=False)
        self.wk = nn.Linear(config.width, config.num_kv_heads * self.head, bias=False)
        self.wv = nn.Linear(config.width, config.num_kv_heads * self.head, bias=False)
        self.wo = nn.Linear(config.num_heads * self.head, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.num_heads, self.head).transpose(1, 2)  # (B, heads, T, head)
        k = self.wk(x).view(B, T, self.num_kv_heads, self.head).transpose(1, 2)
        v = self.wv(x).view(B, T, self.num_kv_heads, self.head).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        times = self.num_heads // self.num_kv_heads
        y = F.scaled_dot_product_attention(q, repeat_kv(k, times), repeat_kv(v, times), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, self.num_heads * self.head))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, config.eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """The whole model; returns the logits, and the loss when targets are given."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.eps)
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Take token ids (batch, time); targets of the same shape, -1 where there is no label."""
        x = self.tok_embeddings(idx)
        cos, sin = self.cos[: idx.size(1)], self.sin[: idx.size(1)]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def build_model() -> nn.Module:
    """Build the model that the planner and the training script use."""
    return Llama(Config())


def example_inputs(batch_size: int) -> dict[str, Tensor]:
    """Inputs of the right shapes; the values do not matter to the planner."""
    config = Config()
    tokens = torch.zeros(batch_size, config.block_size, dtype=torch.long)
    return {"idx": tokens, "targets": tokens}
