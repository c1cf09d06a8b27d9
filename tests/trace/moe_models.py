"""Small mixtures of experts in the shapes of Hugging Face's."""

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import nn

_SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 66,
    "max_position_embeddings": 16, "num_experts_per_tok": 2,
}  # fmt: skip


def _config(name: str, num_layers: int, **sizes: object) -> object:
    import transformers

    return getattr(transformers, name)(**{**_SIZES, "num_hidden_layers": num_layers, **sizes})


def mixtral(num_layers: int = 2) -> object:
    return _config("MixtralConfig", num_layers, num_local_experts=4)


def deepseek_v3(num_layers: int = 3) -> object:
    """One dense layer, then experts in groups, of which a token uses some; one shared expert; latent attention."""
    return _config(
        "DeepseekV3Config", num_layers, num_key_value_heads=4, moe_intermediate_size=8, n_routed_experts=8,
        num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=12,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip


def qwen2_moe(num_layers: int = 2) -> object:
    """A shared expert behind a gate."""
    return _config(
        "Qwen2MoeConfig", num_layers, moe_intermediate_size=8, shared_expert_intermediate_size=12, num_experts=8
    )


def qwen3_moe(num_layers: int = 2) -> object:
    return _config(
        "Qwen3MoeConfig", num_layers, moe_intermediate_size=8, num_experts=8, norm_topk_prob=True, head_dim=4
    )


CONFIGS: Mapping[str, Callable[[], object]] = {
    "mixtral": mixtral, "deepseek-v3": deepseek_v3, "qwen2-moe": qwen2_moe, "qwen3-moe": qwen3_moe,
}  # fmt: skip


def build(name: str) -> nn.Module:
    """The model in float64 with weights large enough that routing matters."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(CONFIGS[name]()).double().train()
    model.set_experts_implementation("eager")  # the default has no kernel for float64
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model
