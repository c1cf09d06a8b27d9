"""The split of the samples: parts run one after the other give the loss and gradients of the whole batch."""

from collections.abc import Mapping

import pytest
import torch
import zoo
from rule_prover import CPU, as_tuple
from torch import Tensor

from autoplan.errors import InputError
from autoplan.ir import Graph, GraphInput, OpNode, Param, Ref, SegmentedGraph, TensorMeta
from autoplan.localize import localize_node
from autoplan.runtime.layouts import local_part
from autoplan.runtime.local_ops import (
    LocalAxis,
    LocalUse,
    denominator_operands,
    local_call,
    loss_denominator,
    plain_call,
)
from autoplan.sharding import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Shard
from autoplan.solver.batch import BatchSplit, check_parts, split_batch
from autoplan.trace import attention
from autoplan.trace.capture import Traced, flatten_inputs, trace_model

Values = dict[str, Tensor]
ALONE = LocalAxis(size=1, coordinate=0, group=None, form="")


def segmented(graph: Graph) -> SegmentedGraph:
    return SegmentedGraph(graph=graph, prelude=(), segments=(), kind_names=())


def given_values(traced: Traced, model: torch.nn.Module, batch: Mapping[str, Tensor]) -> Values:
    leaves = flatten_inputs(traced, (), batch)
    values = {item.value: leaf for item, leaf in zip(traced.graph.inputs, leaves, strict=True)}
    values |= {f"param:{name}": p for name, p in model.named_parameters()}
    values |= {f"buffer:{name}": b for name, b in model.named_buffers()}
    values |= traced.constants
    return {name: x for name, x in values.items() if name in traced.graph.metas}


def run_whole(graph: Graph, values: Values) -> Values:
    values = dict(values)
    for node in graph.nodes:
        results = as_tuple(plain_call(node, tuple(values[name] for name in node.operands), CPU))
        values.update(zip(node.results, results, strict=True))
    return values


def run_part(graph: Graph, split: BatchSplit, given: Values, whole: Values, parts: int, part: int) -> Values:
    """One part of the batch, by the strategies of the split; only slices happen between ops."""
    values = {name: local_part(x, split.placement(name), parts, part) for name, x in given.items()}
    for node in graph.nodes:
        strategy = split.strategy(node.name)
        operands = []
        for name, wanted in zip(node.operands, strategy.inputs, strict=True):
            found = split.placement(name)
            assert found == wanted or isinstance(wanted, Shard) and not isinstance(found, Shard)
            operands.append(values[name] if found == wanted else local_part(values[name], wanted, parts, part))
        if strategy.local:
            axis = LocalAxis(size=parts, coordinate=part, group=None, form=strategy.local)
            shapes = tuple(graph.metas[name].shape for name in node.operands)
            use = LocalUse(node=node, shapes=shapes, batch=axis, tensor=ALONE, device=CPU)
            results = (local_call(use, tuple(operands), _denominator(node, strategy.local, whole)),)
        else:
            results = as_tuple(plain_call(localize_node(node, strategy, parts, part), tuple(operands), CPU))
        values.update(zip(node.results, results, strict=True))
    return values


def _denominator(node: OpNode, form: str, whole: Values) -> Tensor | None:
    if form != "cross_entropy_tokens":
        return None
    return loss_denominator(node, *(whole[name] for name in denominator_operands(node)))


@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_parts_add_up_to_the_whole_batch(name: str) -> None:
    model, batch = zoo.build(name), zoo.ZOO[name].batch(4, 0)
    with zoo.InFloat64():
        traced = trace_model(model, batch)
    graph = traced.graph
    split = split_batch(segmented(graph))
    assert split.obstacle == "" and graph.loss is not None
    assert split.placement(graph.loss) == PARTIAL
    given = given_values(traced, model, batch)
    whole = run_whole(graph, given)
    params = [given[p.value] for p in graph.params]
    expected = torch.autograd.grad(whole[graph.loss], params)
    for parts in (2, 4):
        check_parts(split, graph, parts)
        found = [run_part(graph, split, given, whole, parts, part)[graph.loss] for part in range(parts)]
        torch.testing.assert_close(sum(found), whole[graph.loss], rtol=1e-10, atol=1e-12)
        grads = torch.autograd.grad(sum(found), params)
        torch.testing.assert_close(grads, expected, rtol=1e-9, atol=1e-11)


def test_a_mask_made_from_constants_is_split_with_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_RANGES", ())  # so that the mask is kept
    traced = trace_model(zoo.build("hf-gpt2"), zoo.ZOO["hf-gpt2"].batch(4, 0))
    split = split_batch(segmented(traced.graph))
    found = [n for n in traced.graph.nodes if n.op == "aten.scaled_dot_product_attention.default"]
    assert all(split.placement(node.operands[3]) == Shard(0) for node in found)
    forms = {split.strategy(n.name).local for n in traced.graph.nodes if n.op.startswith("aten.arange")}
    assert forms == {"", "arange"}


def build(*nodes: OpNode, batch: int = 4, loss: str | None = None, outputs: tuple[str, ...] = ()) -> Graph:
    """A graph with one input x [batch, 6] and one parameter w [6, 6]."""
    return Graph(
        nodes=nodes,
        params=(Param(name="w", meta=floats(6, 6)),),
        constants=(),
        inputs=(GraphInput(value="input:0", path="x", meta=floats(batch, 6), batch_dim=0),),
        outputs=tuple(Ref(name) for name in outputs),
        loss=loss,
        batch_size=batch,
    )


def floats(*shape: int) -> TensorMeta:
    return TensorMeta(shape=shape, dtype="float32")


def op(name: str, target: str, *args: object, shape: tuple[int, ...]) -> OpNode:
    converted = tuple(Ref(a) if isinstance(a, str) else a for a in args)
    return OpNode(
        name=name, op=f"aten.{target}", args=converted, outputs=(floats(*shape),),  # type: ignore[arg-type]
        module_path="head", source="model.py:7, in forward",
    )  # fmt: skip


def test_mixing_samples_is_an_obstacle_with_its_place() -> None:
    graph = build(
        op("y", "linear.default", "input:0", "param:w", shape=(4, 6)),
        op("z", "softmax.int", "y", 0, shape=(4, 6)),
        outputs=("z",),
    )
    split = split_batch(segmented(graph))
    assert "aten.softmax.int in module head (model.py:7, in forward) mixes samples" in split.obstacle
    assert split.placement("input:0") == REPLICATE
    check_parts(split, graph, 1)
    with pytest.raises(InputError, match="cannot be split into 2 parts: aten.softmax.int in module head"):
        check_parts(split, graph, 2)


def test_what_params_alone_make_stays_whole_or_follows_its_readers() -> None:
    graph = build(
        op("half", "mul.Tensor", "param:w", 0.5, shape=(6, 6)),
        op("first", "select.int", "param:w", 0, 0, shape=(6,)),
        op("row", "expand.default", "first", (4, 6), shape=(4, 6)),
        op("y", "linear.default", "input:0", "half", shape=(4, 6)),
        op("z", "add.Tensor", "y", "row", shape=(4, 6)),
        op("loss", "mean.default", "z", shape=()),
        loss="loss",
        outputs=("loss",),
    )
    split = split_batch(segmented(graph))
    assert split.obstacle == ""
    assert split.placement("half") == REPLICATE_PARTIAL_GRAD
    assert split.placement("row") == Shard(0)
    assert split.placement("first") == REPLICATE_PARTIAL_GRAD
    assert split.strategy("loss").local == "mean"


def test_a_loss_of_params_alone_is_an_obstacle() -> None:
    graph = build(op("loss", "sum.default", "param:w", shape=()), loss="loss", outputs=("loss",))
    assert "not a sum over them" in split_batch(segmented(graph)).obstacle


def test_parts_divide_the_batch() -> None:
    graph = build(op("y", "linear.default", "input:0", "param:w", shape=(6, 6)), batch=6, outputs=("y",))
    split = split_batch(segmented(graph))
    check_parts(split, graph, 3)
    with pytest.raises(InputError, match=r"a batch of 6 cannot be split into 4 equal parts .* possible are 1, 2, 3, 6"):
        check_parts(split, graph, 4)


def test_one_sample_is_whole() -> None:
    graph = build(op("y", "linear.default", "input:0", "param:w", shape=(1, 6)), batch=1, outputs=("y",))
    split = split_batch(segmented(graph))
    assert split.obstacle == "a batch of 1 cannot be divided"
    check_parts(split, graph, 1)
