"""Transformer families of published runs, in plain PyTorch, built from the sizes that tables of runs give.

A ``Shape`` is one architecture: GPT-like (LayerNorm, GELU, learned positions) or Llama-like (RMSNorm, SwiGLU, rotary
positions), with attention in one fused op or, as before flash attention, in four.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes and style of one architecture."""

    family: Literal["gpt", "llama"]
    num_layers: int
    width: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    seq_len: int
    tied: bool
    bias: bool = True
    fused_attention: bool = True
    dropout: float = 0.0
    wide_loss: bool = True
    """Whether logits are cast to float32 before the loss."""

    @property
    def num_params(self) -> int:
        """Weights of matrices and embeddings, without biases, norms and learned positions."""
        head = self.width // self.num_heads
        attention = 2 * self.width * (self.num_heads + self.num_kv_heads) * head
        mlp = (2 if self.family == "gpt" else 3) * self.width * self.hidden
        return self.num_layers * (attention + mlp) + (1 if self.tied else 2) * self.vocab_size * self.width


class Attention(nn.Module):
    """Causal attention; queries, keys and values have one merged projection where they have as many heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.head = shape.width // shape.num_heads
        if shape.num_heads == shape.num_kv_heads:
            self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        else:
            self.q = nn.Linear(shape.width, shape.width, bias=shape.bias)
            self.k = nn.Linear(shape.width, shape.num_kv_heads * self.head, bias=shape.bias)
            self.v = nn.Linear(shape.width, shape.num_kv_heads * self.head, bias=shape.bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """Map (batch, time, width) to the same shape; ``tables`` are cosines and sines, or nothing."""
        B, T, C = x.shape
        q, k, v = (part.view(B, T, -1, self.head).transpose(1, 2) for part in self._project(x))  # (B, heads, T, head)
        if tables:
            q, k = rotate(q, *tables), rotate(k, *tables)
        times = self.shape.num_heads // self.shape.num_kv_heads
        if times > 1:
            k, v = repeat_kv(k, times), repeat_kv(v, times)
        y = self._attend(q, k, v).transpose(1, 2).reshape(B, T, C)
        return self.out(y)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.shape.num_heads == self.shape.num_kv_heads:
            return self.qkv(x).split(self.shape.width, dim=2)
        return self.q(x), self.k(x), self.v(x)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.shape.fused_attention:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=self.shape.dropout, is_causal=True)
        # One kernel scales, masks and takes the softmax in the runs that this stands for; so does one op here.
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)), dim=-1)
        return torch.matmul(F.dropout(weights, self.shape.dropout), v)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norm1 = _norm(shape)
        self.attention = Attention(shape)
        self.norm2 = _norm(shape)
        self.up = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        if shape.family == "llama":
            self.gate = nn.Linear(shape.width, shape.hidden, bias=shape.bias)
        self.down = nn.Linear(shape.hidden, shape.width, bias=shape.bias)

    def forward(self, x: Tensor, tables: tuple[Tensor, ...]) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        x = x + self._drop(self.attention(self.norm1(x), tables))
        return x + self._drop(self.down(self._act(self.norm2(x))))

    def _act(self, x: Tensor) -> Tensor:
        if self.shape.family == "gpt":
            return F.gelu(self.up(x))
        return F.silu(self.gate(x)) * self.up(x)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.shape.dropout) if self.shape.dropout else x


class Model(nn.Module):
    """The whole model with its loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        if shape.family == "gpt":
            self.positions = nn.Embedding(shape.seq_len, shape.width)
        else:
            cos, sin = rotary_table(shape)
            self.register_buffer("cos", cos, persistent=False)
            self.register_buffer("sin", sin, persistent=False)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        if shape.tied:
            self.tokens.weight = self.head.weight

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """Loss of token ids (batch, time) against targets of the same shape."""
        x = self.tokens(idx)
        tables: tuple[Tensor, ...] = ()
        if self.shape.family == "gpt":
            x = x + self.positions(torch.arange(idx.size(1), device=idx.device))
            x = F.dropout(x, self.shape.dropout) if self.shape.dropout else x
        else:
            tables = (self.cos, self.sin)
        for layer in self.layers:
            x = layer(x, tables)
        logits = self.head(self.norm(x)).view(-1, self.shape.vocab_size)
        return F.cross_entropy(logits.float() if self.shape.wide_loss else logits, targets.view(-1))


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and channel, each (time, head)."""
    head = shape.width // shape.num_heads
    frequency = 10000.0 ** (-torch.arange(0, head, 2).float() / head)
    angle = torch.outer(torch.arange(shape.seq_len).float(), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embeddings to (batch, heads, time, head)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Give every query head its key or value head."""
    B, K, T, H = x.shape
    return x[:, :, None].expand(B, K, times, T, H).reshape(B, K * times, T, H)


def _norm(shape: Shape) -> nn.Module:
    if shape.family == "gpt":
        return nn.LayerNorm(shape.width, bias=shape.bias)
    return nn.RMSNorm(shape.width, eps=1e-5)
