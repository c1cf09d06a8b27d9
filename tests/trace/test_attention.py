"""Causal attention of Hugging Face models: no mask where none is needed, and the mask where one is."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from autoplan.errors import TraceError
from autoplan.ir import OpNode
from autoplan.trace import attention
from autoplan.trace.capture import trace_model

BATCH, LENGTH = 2, 8
SIZES = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip
ATTENTION = "aten.scaled_dot_product_attention.default"


def model(name: str = "Llama", **more: object) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def inputs(**more: Tensor) -> dict[str, Tensor]:
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone(), **more}


def attentions(traced_model: torch.nn.Module, given: dict[str, Tensor]) -> list[OpNode]:
    found = [node for node in trace_model(traced_model, given).graph.nodes if node.op == ATTENTION]
    assert len(found) == SIZES["num_hidden_layers"]
    return found


def is_plain(node: OpNode) -> bool:
    """Causal by the flag, with as many key heads as query heads."""
    return len(node.operands) == 3 and node.args[3:6] == (None, 0.0, True) and "enable_gqa" not in dict(node.kwargs)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2"])
def test_plain_causal_attention_has_no_mask(name: str):
    assert all(map(is_plain, attentions(model(name), inputs())))


def test_positions_that_are_given_may_be_packed():
    positions = torch.arange(LENGTH).repeat(BATCH, 1)
    assert not any(map(is_plain, attentions(model(), inputs(position_ids=positions))))


def test_padding_keeps_its_mask():
    padding = torch.ones(BATCH, LENGTH, dtype=torch.long)
    assert not any(map(is_plain, attentions(model(), inputs(attention_mask=padding))))


def test_a_window_keeps_its_mask():
    assert not any(map(is_plain, attentions(model("Mistral", sliding_window=4), inputs())))


def test_positions_that_do_not_count_up_keep_their_mask(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "_RANGES", ())
    assert not any(map(is_plain, attentions(model(), inputs())))


def test_transformers_is_put_back_also_after_a_failure():
    before = (
        masking_utils.is_torchdynamo_exporting,
        masking_utils.find_packed_sequence_indices,
        ALL_ATTENTION_FUNCTIONS["sdpa"],
    )
    attentions(model(), inputs())
    with pytest.raises(TraceError):
        trace_model(model(), {"input_ids": torch.zeros(BATCH, LENGTH), "labels": torch.zeros(1)})
    after = (
        masking_utils.is_torchdynamo_exporting,
        masking_utils.find_packed_sequence_indices,
        ALL_ATTENTION_FUNCTIONS["sdpa"],
    )
    assert all(one is other for one, other in zip(before, after, strict=True))
