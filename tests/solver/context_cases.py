"""Models as traced, and every value as one device computes it, for the tests of the context axis."""

from dataclasses import dataclass
from functools import cache

import torch
import zoo
from test_batch import given_values, run_whole
from torch import Tensor, nn
from toy_cost import ToyCost

from autoplan.cluster import Group
from autoplan.ir import SegmentedGraph
from autoplan.solver.batch import BatchSplit, split_batch
from autoplan.solver.build import Model, make_model
from autoplan.solver.context import Context, make_context
from autoplan.solver.problem import Axis
from autoplan.trace.capture import trace_model
from autoplan.trace.segments import segment_graph

COMPUTE_BOUND = ToyCost(latency_us=0.0, link_bytes_per_us=3e2)
"""On models this small a latency would be dearer than doing all the work on every rank. Links are slower than memory:
else keys would be gathered after they are repeated for their heads, and each rank sum fewer of their gradients."""
EXCHANGE, GATHER = 1, 64
"""Tensor degrees: with 64 no head could be exchanged."""
BLOCK = 1


def _deepseek() -> nn.Module:
    """Latent attention, a dense layer, then experts in groups."""
    import transformers

    config = transformers.DeepseekV3Config(
        num_hidden_layers=3, max_position_embeddings=16, hidden_size=16, intermediate_size=24, vocab_size=66,
        num_attention_heads=4, num_key_value_heads=4, moe_intermediate_size=8, n_routed_experts=8, n_group=4,
        num_experts_per_tok=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=8,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double()


DENSE = ("nanogpt", "llama", "hf-gpt2", "hf-llama")
MIXTURES = ("hf-mixtral", "deepseek-v3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model as traced, and every value as one device computes it."""

    sg: SegmentedGraph
    split: BatchSplit
    whole: dict[str, Tensor]
    grads: dict[str, Tensor]

    def model(self, parts: int = 1) -> Model:
        return make_model(self.sg, self.split, parts)

    def context(self, degree: int, tensor_degree: int, parts: int = 1) -> Context:
        axis = Axis(group=Group(size=degree, per_node=degree), cost=COMPUTE_BOUND)
        return make_context(self.model(parts), self.split, axis, tensor_degree=tensor_degree)


@cache
def case(name: str, batch: int = 4) -> Case:
    with zoo.InFloat64():
        latent = name == "deepseek-v3"
        model = _deepseek() if latent else zoo.build(name)
        inputs = zoo.ZOO["hf-llama" if latent else name].batch(4, 0)
        inputs = {key: x[:batch] for key, x in inputs.items()}  # the last sample has no valid label
        traced = trace_model(model, inputs)
        given = given_values(traced, model, inputs)
        whole = run_whole(traced.graph, given)
        params = [param.value for param in traced.graph.params]
        loss = whole[traced.graph.loss or ""]
        found = torch.autograd.grad(loss, [whole[name] for name in params], allow_unused=True)
    sg = segment_graph(traced.graph)
    return Case(
        sg=sg,
        split=split_batch(sg),
        whole={name: x.detach() for name, x in whole.items()},
        grads={name: grad for name, grad in zip(params, found, strict=True) if grad is not None},
    )
