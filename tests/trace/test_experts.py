"""Mixtures of experts: the op against transformers' own loop, one node per layer, what is refused and restored."""

import moe_models
import pytest
import torch
from graph_interpreter import run_graph
from torch import Tensor, nn
from trace_models import tokens
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from autoplan.errors import TraceError
from autoplan.solver.experts import expert_nodes, expert_params, num_experts
from autoplan.solver.rules import check_rules
from autoplan.trace import experts_op
from autoplan.trace.capture import trace_model
from autoplan.trace.experts import experts_as_one_op

BATCH = {"input_ids": tokens(66, 4, 12), "labels": tokens(66, 4, 12, seed=1)}
MODELS = list(moe_models.CONFIGS)


def loss_and_gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(**BATCH).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def differences(model: nn.Module) -> dict[str, float]:
    """Between transformers' loop over experts and our op; relative to the largest value of each gradient."""
    expected = loss_and_gradients(model)
    with experts_as_one_op(model):
        found = loss_and_gradients(model)
    assert found.keys() == expected.keys()
    return {n: ((found[n] - x).abs().max() / x.abs().max().clamp(min=1e-30)).item() for n, x in expected.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_op_computes_what_transformers_does(name: str) -> None:
    off = differences(moe_models.build(name))
    assert max(off.values()) < 1e-6, off  # routers and norms are in float32 whatever the model's dtype


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    silu = experts_op.ACTIVATIONS["silu"][0]
    monkeypatch.setitem(experts_op.ACTIVATIONS, "silu", (silu, lambda grad, x: grad))
    assert max(differences(moe_models.build("mixtral")).values()) > 1e-3


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", list(experts_op.ACTIVATIONS))
def test_gradients_are_the_derivatives(activation: str, gated: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()

    index = torch.tensor([[0, 1], [2, 0], [1, -1], [2, 7]])  # -1 and 7 are no experts

    def run(hidden: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.ops.autoplan.experts(hidden, index, weights, first, second, activation, 3)

    assert torch.autograd.gradcheck(run, (draw(4, 4), draw(4, 2), draw(3, 6 if gated else 3, 4), draw(3, 4, 3)))


def test_half_precision_adds_up_in_the_dtype_of_the_weights() -> None:
    hidden, first, second = (torch.randn(shape).bfloat16() for shape in ((5, 4), (3, 6, 4), (3, 4, 3)))
    index, weights = torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    found = torch.ops.autoplan.experts(hidden, index, weights, first, second, "silu", 3)
    exact = torch.ops.autoplan.experts(hidden.float(), index, weights, first.float(), second.float(), "silu", 3)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_of_experts_is_one_node_and_every_op_has_a_rule(name: str) -> None:
    model = moe_models.build(name)
    before = model.config._experts_implementation
    graph = trace_model(model, BATCH).graph
    check_rules(graph.nodes)
    nodes = expert_nodes(graph.nodes)
    assert len(nodes) == 2
    assert num_experts(graph) == (4 if name == "mixtral" else 8)
    for node in nodes:
        assert all(graph.metas[value].shape[0] == num_experts(graph) for value in expert_params(node))
    assert model.config._experts_implementation == before and "autoplan" not in ALL_EXPERTS_FUNCTIONS


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_computes_what_the_model_does(name: str) -> None:
    model = moe_models.build(name)
    traced = trace_model(model, BATCH)
    found = run_graph(traced, model, (), BATCH)
    expected = model(**BATCH)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-6, atol=1e-6)


def test_experts_that_compute_something_else_are_refused() -> None:
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=4, num_key_value_heads=2,
        head_dim=4, num_local_experts=4, num_experts_per_tok=2, vocab_size=66, max_position_embeddings=16,
    )  # fmt: skip
    with pytest.raises(TraceError, match="GptOssExperts add a bias and interleave gate and up and gate in their own"):
        trace_model(AutoModelForCausalLM.from_config(config), BATCH)
    assert "autoplan" not in ALL_EXPERTS_FUNCTIONS


class Looping(nn.Module):
    """Experts as a loop whose length depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x.argmax(-1)
        found = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero().squeeze(1)
            if rows.numel() > 0:
                found = found.index_add(0, rows, expert(x[rows]))
        return found.sum()


def test_a_loop_over_experts_names_the_line_and_the_way_out() -> None:
    with pytest.raises(TraceError) as caught:
        trace_model(Looping(), (torch.randn(6, 4),))
    message = str(caught.value)
    assert "test_experts.py" in message and "in forward" in message
    assert "torch.ops.autoplan.experts" in message
