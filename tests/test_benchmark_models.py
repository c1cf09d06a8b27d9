"""The models of the benchmarks have the sizes that were published."""

import json
from pathlib import Path

import pytest
import torch

from autoplan.trace.source import load_model

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"


def num_params(spec: str) -> int:
    return sum(param.numel() for param in load_model(str(MODELS / spec)).build().parameters())


@pytest.mark.parametrize(("spec", "published"), [
    ("gpt.py", 124_439_808),
    ("llama-3-8b/config.json", 8_030_261_248),
    ("llama-3-70b/config.json", 70_553_706_496),
    ("llama-3.1-405b/config.json", 405_853_388_800),
    ("llama3.py:build_8b", 8_030_261_248),
    ("llama3.py:build_70b", 70_553_706_496),
    ("llama3.py:build_405b", 405_853_388_800),
    ("mixtral-8x22b/config.json", 140_620_634_112),
    ("deepseek-v3/config.json", 671_026_404_352),
])  # fmt: skip
def test_numbers_of_parameters(spec: str, published: int) -> None:
    assert num_params(spec) == published


@pytest.mark.parametrize(("name", "billions"), [("145b", 145.6), ("310b", 310.1), ("530b", 529.6), ("1t", 1008.0)])
def test_numbers_of_parameters_of_the_megatron_paper(name: str, billions: float) -> None:
    assert num_params(f"gpt.py:build_{name}") / 1e9 == pytest.approx(billions, abs=0.05)


def test_experts_that_a_token_does_not_visit_are_inactive() -> None:
    for name, experts, active_billions in (("mixtral-8x22b", 8, 39), ("deepseek-v3", 256, 37)):
        config = json.loads((MODELS / name / "config.json").read_text())
        model = load_model(str(MODELS / name / "config.json")).build()
        routed = sum(param.numel() for path, param in model.named_parameters() if ".experts." in path)
        whole = sum(param.numel() for param in model.parameters()) - routed
        active = whole + routed * config["num_experts_per_tok"] // experts
        assert active / 1e9 == pytest.approx(active_billions, rel=0.02)


def test_inputs_have_the_length_that_is_asked_for() -> None:
    inputs = load_model(str(MODELS / "gpt.py"), seq_len=2048).example_inputs(3)
    assert isinstance(inputs, dict)
    tokens = inputs["idx"]
    assert isinstance(tokens, torch.Tensor) and tokens.shape == (3, 2048)
