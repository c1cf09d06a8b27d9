"""A Hugging Face ``config.json`` -> functions that build the causal language model and its inputs."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from autoplan.errors import InputError

MAX_DEFAULT_SEQ_LEN = 2048
"""Sequence length when none is given and the config allows more."""


def hf_functions(
    path: Path, seq_len: int | None
) -> tuple[Callable[[], object], Callable[[int], object], tuple[str, ...]]:
    """Factory, example inputs ({input_ids, labels} of (batch, seq_len)) and notes of the config's causal LM."""
    try:
        import transformers  # an optional dependency: only models given as config.json need it
    except ImportError as error:
        raise InputError(f"{path} is a Hugging Face config: run `pip install autoplan[hf]` to use it") from error
    fields = _read(path)
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except Exception as error:  # a config class checks its fields in its own ways
        raise InputError(
            f"{path} is not a config that transformers {transformers.__version__} knows: {error}"
        ) from error
    config.use_cache = False
    longest = getattr(config, "max_position_embeddings", None)
    length = seq_len or min(longest or MAX_DEFAULT_SEQ_LEN, MAX_DEFAULT_SEQ_LEN)
    if longest is not None and length > longest:
        raise InputError(f"--seq-len {length} is more than max_position_embeddings {longest} in {path}")
    notes = ["config.use_cache is off: a key-value cache is for generation, not for training"]
    if seq_len is None:
        origin = "the config" if length == longest else "the default"
        notes.append(f"sequence length {length} (from {origin}); change it with --seq-len")

    def inputs(batch_size: int) -> dict[str, Tensor]:
        ids = torch.zeros(batch_size, length, dtype=torch.long)
        return {"input_ids": ids, "labels": torch.zeros_like(ids)}

    def build() -> object:
        made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        return made.train()

    return build, inputs, tuple(notes)


def _read(path: Path) -> dict[str, str]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise InputError(f'{path} is not a Hugging Face config: it has no "model_type"')
    return fields
