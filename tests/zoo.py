"""The models of the oracle: tiny, in float64, with the awkward sizes. Each is built by name in every process."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model and one batch for it; labels are partly ignored, in unequal numbers over the samples."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    """From batch size and seed."""
    eval_inputs: Callable[[Batch], Batch]


def _labels(tokens: Tensor, ignored: int) -> Tensor:
    labels = tokens.roll(-1, 1).clone()
    for row in range(labels.shape[0]):
        labels[row, : (row * 3) % labels.shape[1]] = ignored
    labels[-1] = ignored
    return labels


def _tokens(batch: int, length: int, vocab: int, seed: int) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def _nanogpt() -> nn.Module:
    import nanogpt

    return nanogpt.GPT(nanogpt.Config(vocab_size=67, block_size=12, num_layers=4, num_heads=4, width=16))


def _plain_batch(vocab: int) -> Callable[[int, int], Batch]:
    def batch(size: int, seed: int) -> Batch:
        tokens = _tokens(size, 12, vocab, seed)
        return {"idx": tokens, "targets": _labels(tokens, -1)}

    return batch


def _llama() -> nn.Module:
    import llama

    return llama.Llama(llama.Config(vocab_size=66, block_size=12, num_layers=4, num_heads=4, num_kv_heads=2, width=16))


def _hf(kind: str) -> nn.Module:
    import transformers

    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_layer=4, n_head=4, n_embd=16, vocab_size=67, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLMLoss",
        )  # fmt: skip
    elif kind == "mixtral":
        config = transformers.MixtralConfig(
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=24,
            vocab_size=66, max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2,
            experts_implementation="eager",
        )  # fmt: skip
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=16, intermediate_size=24,
            vocab_size=66, max_position_embeddings=16,
        )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def _hf_batch(vocab: int) -> Callable[[int, int], Batch]:
    def batch(size: int, seed: int) -> Batch:
        tokens = _tokens(size, 12, vocab, seed)
        return {"input_ids": tokens, "labels": _labels(tokens, -100)}

    return batch


ZOO: dict[str, Entry] = {
    "nanogpt": Entry(build=_nanogpt, batch=_plain_batch(67), eval_inputs=lambda b: {"idx": b["idx"]}),
    "llama": Entry(build=_llama, batch=_plain_batch(66), eval_inputs=dict),
    "hf-gpt2": Entry(
        build=lambda: _hf("gpt2"), batch=_hf_batch(67), eval_inputs=lambda b: {"input_ids": b["input_ids"]}
    ),
    "hf-mixtral": Entry(build=lambda: _hf("mixtral"), batch=_hf_batch(66), eval_inputs=dict),
    "hf-llama": Entry(build=lambda: _hf("llama"), batch=_hf_batch(66), eval_inputs=dict),
}


class InFloat64(TorchFunctionMode):
    """Lift casts to float32 to float64.

    Llama's norm and Hugging Face's norms, rotary tables and losses compute in float32 whatever the model's dtype,
    which hides every difference below 1e-7. Under this mode the plain and the planned run are in float64 throughout.
    """

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        lifted = {k: _lift(v) for k, v in (kwargs or {}).items()}  # type: ignore[attr-defined]
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_lift, args), **lifted)


def _lift(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def build(name: str) -> nn.Module:
    """The model in float64 with weights that depend on the name only."""
    torch.manual_seed(sum(map(ord, name)))
    return ZOO[name].build().double()
