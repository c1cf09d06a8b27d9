"""Models that several trace tests share."""

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokens(vocab: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def hf_model(config: object) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AutoModelForCausalLM.from_config(config).train()


def hf_gpt2(num_layers: int = 2) -> nn.Module:
    from transformers import GPT2Config

    sizes = {"n_layer": num_layers, "n_head": 4, "n_embd": 32, "vocab_size": 67, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return hf_model(GPT2Config(**sizes, **off))


def hf_llama(num_layers: int = 2) -> nn.Module:
    from transformers import LlamaConfig

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 67, "max_position_embeddings": 32}
    return hf_model(LlamaConfig(num_hidden_layers=num_layers, **heads, **sizes))
