"""A run's architecture -> the ``Shape`` of its model: which family, whether the head is tied, what is fused."""

from dataclasses import replace
from itertools import product

from families import Shape

from accuracy.rows import Run

GPT2_VOCABULARY = 51_200
"""Of GPT-like models whose table names none: that of GPT-2, padded as Megatron-LM pads it."""
PADDED_TO = 128
"""Vocabularies of GPT-like models are padded to a multiple, as Megatron-LM does for its vocabulary-split head."""
DROPOUT = 0.1
"""Default of Megatron-LM, which the runs without flash attention used."""
_LLAMAS = ("llama", "mistral", "mixtral", "internlm", "qwen", "gemma", "vicuna", "alpaca", "deepseek", "yi-", "smollm")
_TIED_GPTS = ("gpt", "mpt", "opt", "bloom")


def shape_of(run: Run) -> Shape:
    """The shape; among styles that the name leaves open, the one whose parameters come nearest to those published."""
    base = _named(run)
    if not run.sizes.params:
        return base
    styles = product(("gpt", "llama"), (False, True)) if _is_unknown(run) else ((base.family, t) for t in (True, False))
    shapes = [replace(base, family=family, tied=tied) for family, tied in styles]
    return min(shapes, key=lambda shape: abs(shape.num_params - run.sizes.params))


def _is_unknown(run: Run) -> bool:
    return not _is_llama(run) and not any(name in run.model.lower() for name in _TIED_GPTS)


def _is_llama(run: Run) -> bool:
    return any(name in run.model.lower() for name in _LLAMAS)


def _named(run: Run) -> Shape:
    """What the name of the model and the columns say."""
    sizes, llama = run.sizes, _is_llama(run)
    unfused = "fused-softmax" in run.attention or "unfused" in run.attention
    is_mpt = "mpt" in run.model.lower()
    vocabulary = sizes.vocab_size or GPT2_VOCABULARY
    return Shape(
        family="llama" if llama else "gpt",
        num_layers=sizes.num_layers,
        width=sizes.width,
        hidden=sizes.hidden,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        vocab_size=vocabulary if llama else -(-vocabulary // PADDED_TO) * PADDED_TO,
        seq_len=sizes.seq_len,
        tied=not llama,
        bias=not llama and not is_mpt,
        fused_attention=not unfused,
        dropout=DROPOUT if unfused else 0.0,
        wide_loss=not is_mpt or "amp" in run.dtype,
    )
