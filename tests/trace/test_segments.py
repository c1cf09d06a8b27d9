import time

import pytest
import torch
from torch import Tensor, nn
from trace_models import hf_gpt2, hf_llama, load_example, tokens

from autoplan.ir import Graph, Segment, SegmentedGraph
from autoplan.trace.capture import trace_model
from autoplan.trace.repeats import Repeat, find_repeat
from autoplan.trace.segments import segment_graph


def graph_of(name: str) -> Graph:
    ids = tokens(67, 2, 16)
    match name:
        case "nanogpt" | "llama":
            example = load_example(name)
            return trace_model(example.build_model(), example.example_inputs(2)).graph
        case "hf_gpt2":
            return trace_model(hf_gpt2(3), {"input_ids": ids, "labels": ids}).graph
        case _:
            return trace_model(hf_llama(3), {"input_ids": ids, "labels": ids}).graph


def assert_chain(segmented: SegmentedGraph) -> None:
    """Segments and prelude partition the nodes in order, list what they read and make, and align inside a class."""
    graph = segmented.graph
    inside = [name for s in segmented.segments for name in s.nodes]
    assert sorted(inside + list(segmented.prelude)) == sorted(n.name for n in graph.nodes)
    order = {node.name: i for i, node in enumerate(graph.nodes)}
    assert inside == sorted(inside, key=order.__getitem__)
    by_name = {node.name: node for node in graph.nodes}
    for segment in segmented.segments:
        nodes = [by_name[name] for name in segment.nodes]
        made = {name for node in nodes for name in node.results}
        read = {name for node in nodes for name in node.operands}
        assert set(segment.params) | set(segment.inputs) == read - made
        assert set(segment.outputs) <= made
        assert_aligned(graph, segment, segmented.representative(segment.kind))
    assert len(set(segmented.kind_names)) == len(segmented.kind_names) == 1 + max(s.kind for s in segmented.segments)


def assert_aligned(graph: Graph, one: Segment, two: Segment) -> None:
    by_name = {node.name: node for node in graph.nodes}
    a, b = [by_name[n] for n in one.nodes], [by_name[n] for n in two.nodes]
    places = {}
    for x, y in zip(a, b, strict=True):
        assert (x.op, x.outputs) == (y.op, y.outputs)
        for p, q in zip((*x.operands, *x.results), (*y.operands, *y.results), strict=True):
            assert places.setdefault(p, q) == q
    for field in ("params", "inputs", "outputs"):
        assert tuple(places[name] for name in getattr(one, field)) == getattr(two, field)
        assert [graph.metas[n] for n in getattr(one, field)] == [graph.metas[n] for n in getattr(two, field)]


@pytest.mark.parametrize(("name", "layers"), [("nanogpt", 4), ("llama", 4), ("hf_gpt2", 3), ("hf_llama", 3)])
def test_transformer_is_embed_blocks_head(name: str, layers: int) -> None:
    segmented = segment_graph(graph_of(name))
    assert_chain(segmented)
    assert segmented.kind_names == ("embed", "block", "head")
    assert [s.kind for s in segmented.segments] == [0, *[1] * layers, 2]
    block = segmented.segments[1]
    paths = {segmented.graph.node_of[value].module_path for value in block.nodes if value in segmented.graph.node_of}
    assert all("0" in path.split(".") for path in paths)


def test_prelude_is_what_no_parameter_reaches() -> None:
    segmented = segment_graph(graph_of("hf_llama"))
    by_name = {node.name: node for node in segmented.graph.nodes}
    assert any(by_name[name].op == "aten.cos.default" for name in segmented.prelude)
    assert all(not v.startswith("param:") for name in segmented.prelude for v in by_name[name].operands)


def mlp(*widths: int) -> nn.Module:
    layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def test_mlp_without_repetition_is_cut_at_modules() -> None:
    segmented = segment_graph(trace_model(mlp(3, 4, 5, 6), (torch.zeros(2, 3),)).graph)
    assert_chain(segmented)
    assert [len(s.nodes) for s in segmented.segments] == [2, 2, 1]
    assert [s.kind for s in segmented.segments] == [0, 1, 2]


def test_mlp_with_equal_widths_repeats() -> None:
    segmented = segment_graph(trace_model(mlp(3, 4, 4, 4, 4, 5), (torch.zeros(2, 3),)).graph)
    assert_chain(segmented)
    assert [s.kind for s in segmented.segments].count(1) == 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.router = nn.Linear(4, 2)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.inner(x + memory), self.router(x)


class LongSkips(nn.Module):
    """A value that every layer reads, and one per layer that only the loss reads: there is no narrow cut."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.first(x)
        routed = []
        for layer in self.layers:
            x, logits = layer(x, memory)
            routed.append(logits)
        return x.sum() + torch.cat(routed).sum()


def test_long_skips_are_carried() -> None:
    segmented = segment_graph(trace_model(LongSkips(5), (torch.zeros(2, 4),)).graph)
    assert_chain(segmented)
    counts = [s.kind for s in segmented.segments]
    assert max(counts.count(kind) for kind in counts) >= 4


class Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=i % 2 == 0) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_alternating_layers_are_one_unit() -> None:
    segmented = segment_graph(trace_model(Alternating(), (torch.zeros(2, 4),)).graph)
    assert_chain(segmented)
    assert [s.kind for s in segmented.segments] == [0, 1, 1, 1]
    assert segmented.kind_names == ("embed", "block")


def test_two_stacks_are_two_kinds() -> None:
    stack = [
        nn.Linear(3, 4),
        *(nn.Linear(4, 4) for _ in range(3)),
        nn.Linear(4, 6),
        *(nn.Linear(6, 6) for _ in range(3)),
    ]
    segmented = segment_graph(trace_model(nn.Sequential(*stack), (torch.zeros(2, 3),)).graph)
    assert_chain(segmented)
    kinds = [s.kind for s in segmented.segments]
    assert sorted(kinds.count(kind) for kind in set(kinds)) == [1, 1, 3, 3]


def test_frozen_layers_are_another_kind() -> None:
    model = mlp(4, 4, 4, 4, 4)
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    segmented = segment_graph(trace_model(model, (torch.zeros(2, 4),)).graph)
    assert segmented.segments[0].kind != segmented.segments[-1].kind


def repeat(labels: str) -> Repeat | None:
    ones = [1] * len(labels)
    return find_repeat(
        [ord(c) for c in labels], weights=ones, useful=[True] * len(labels), paths=[("", "") for _ in labels]
    )


def test_the_repetition_that_covers_most_with_the_shortest_period() -> None:
    assert repeat("abc") is None
    assert repeat("xabababy") == Repeat(start=1, period=2, count=3)
    assert repeat("eabababh") == Repeat(start=1, period=2, count=3)
    assert repeat("aaaa") == Repeat(start=0, period=1, count=4)


def test_segmenting_is_fast() -> None:
    graph = trace_model(mlp(*[4] * 400), (torch.zeros(2, 4),)).graph
    started = time.perf_counter()
    assert len(segment_graph(graph).segments) > 300
    assert time.perf_counter() - started < 5
