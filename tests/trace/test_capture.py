import dataclasses
from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from graph_interpreter import run_graph
from torch import Tensor, nn
from trace_models import hf_gpt2, hf_llama, load_example, tokens

from autoplan.errors import InputError, TraceError
from autoplan.trace.capture import flatten_inputs, trace_model
from autoplan.trace.inputs import find_batch_dims


def assert_same(found: object, expected: object) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert torch.equal(found, expected)
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping)
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (tuple, list)):
        assert isinstance(found, (tuple, list))
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(found), vars(expected))
    else:
        assert found == expected


def assert_graph_is_model(model: nn.Module, inputs: object) -> None:
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    assert isinstance(args, tuple)
    traced = trace_model(model, inputs)  # type: ignore[arg-type]
    assert_same(run_graph(traced, model, args, kwargs), model(*args, **kwargs))


@pytest.mark.parametrize("name", ["nanogpt", "llama"])
def test_example_graph_gives_the_models_outputs(name: str) -> None:
    example = load_example(name)
    model = example.build_model()
    vocab = 127
    assert_graph_is_model(model, {"idx": tokens(vocab, 2, 64), "targets": tokens(vocab, 2, 64)})
    assert_graph_is_model(model, (tokens(vocab, 2, 64),))


@pytest.mark.parametrize("make", [hf_gpt2, hf_llama])
def test_hf_graph_gives_the_models_outputs(make: object) -> None:
    model = make()  # type: ignore[operator]
    ids = tokens(67, 2, 16)
    traced = trace_model(model, {"input_ids": ids, "labels": ids})  # the same tensor twice
    assert model.config.use_cache is True
    assert "use_cache" in traced.notes[0]
    other = tokens(67, 2, 16, seed=1)
    expected = model(input_ids=ids, labels=other, use_cache=False)
    assert_same(run_graph(traced, model, (), {"input_ids": ids, "labels": other}), expected)


def test_loss_inputs_and_tied_parameters() -> None:
    example = load_example("nanogpt")
    graph = trace_model(example.build_model(), example.example_inputs(4)).graph
    assert graph.batch_size == 4
    assert graph.loss == "cross_entropy_loss"
    assert [(i.path, i.batch_dim) for i in graph.inputs] == [("idx", 0), ("targets", 0)]
    tied = [p for p in graph.params if p.aliases]
    assert [(p.name, p.aliases) for p in tied] == [("wte.weight", ("lm_head.weight",))]
    assert sum("param:wte.weight" in node.operands for node in graph.nodes) == 2
    linear = next(node for node in graph.nodes if node.op == "aten.linear.default")
    assert linear.module_path == "h.0.attn.c_attn"
    assert linear.source.startswith("nanogpt.py:")


def test_digest_is_stable_and_does_not_depend_on_weights_or_device() -> None:
    example = load_example("llama")
    inputs = example.example_inputs(2)
    real = example.build_model()
    with torch.device("meta"):
        meta = example.build_model()
    digests = {trace_model(model, inputs).graph.digest for model in (real, example.build_model(), meta)}
    assert len(digests) == 1


def test_module_is_left_as_it_was() -> None:
    model = hf_llama()
    before = {name: (id(p), p.dtype) for name, p in model.named_parameters()}
    trace_model(model, {"input_ids": tokens(67, 2, 8)}, dtype="bfloat16")
    assert {name: (id(p), p.dtype) for name, p in model.named_parameters()} == before
    assert model.training


def test_dtype_is_that_of_module_to() -> None:
    model = hf_llama()
    ids = tokens(67, 2, 8)
    traced = trace_model(model, {"input_ids": ids, "labels": ids}, dtype="bfloat16")
    half = model.to(torch.bfloat16)
    expected = half(input_ids=ids, labels=ids, use_cache=False)
    assert_same(run_graph(traced, half, (), {"input_ids": ids, "labels": ids}), expected)


@dataclasses.dataclass
class Result:
    value: Tensor
    extra: dict[str, object]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.plain = torch.arange(4.0)

    def forward(self, batch: dict[str, Tensor], scale: float = 1.0, mask: Tensor | None = None) -> Result:
        x = self.layer(batch["x"]) * scale + self.plain + torch.tensor([1.0, 2.0, 3.0, 4.0])
        if mask is not None:
            x = x * mask
        return Result(value=x, extra={"pair": (x.sum(), None), "number": 3, "same": batch["y"]})


def test_nested_inputs_and_outputs_are_rebuilt() -> None:
    model = Nested()
    batch = {"x": torch.randn(3, 4), "y": torch.ones(3)}
    assert_graph_is_model(model, {"batch": batch, "scale": 2.0})
    assert_graph_is_model(model, (batch,))
    assert_graph_is_model(model, (batch, 1.0, torch.ones(3, 4)))


def test_call_that_differs_from_the_trace_is_refused() -> None:
    model = Nested()
    batch = {"x": torch.randn(3, 4), "y": torch.ones(3)}
    traced = trace_model(model, {"batch": batch, "scale": 2.0})
    assert len(flatten_inputs(traced, ({"y": batch["y"], "x": batch["x"]}, 2.0, None), {})) == 2
    with pytest.raises(InputError, match=r"scale was 2\.0 when the model was traced and is now 3\.0"):
        flatten_inputs(traced, (batch,), {"scale": 3.0})
    with pytest.raises(InputError, match="batch is now without y"):
        flatten_inputs(traced, ({"x": batch["x"]},), {"scale": 2.0})
    with pytest.raises(InputError, match="now with mask"):
        flatten_inputs(traced, (batch,), {"scale": 2.0, "mask": torch.ones(3, 4)})
    with pytest.raises(InputError, match="do not fit the model's forward"):
        flatten_inputs(traced, (batch,), {"scales": 2.0})


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 0
        return self.drop(F.relu_(self.layer(x))).add_(1.0).sum()


def test_in_place_ops_become_functional() -> None:
    assert_graph_is_model(InPlace(), (torch.randn(3, 4),))
    ops = {node.op for node in trace_model(InPlace(), (torch.randn(3, 4),)).graph.nodes}
    assert not any(op.split(".")[1].endswith("_") for op in ops)


class HalfRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = self.a(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            student = self.b(x)
        return (student.float() - teacher).pow(2).mean()


def test_no_grad_regions_are_detached_and_autocast_becomes_casts() -> None:
    model, x = HalfRegion(), torch.randn(3, 4)
    traced = trace_model(model, (x,))
    loss = run_graph(traced, model, (x,), {})
    assert isinstance(loss, Tensor)
    assert torch.equal(loss, model(x))
    loss.backward()
    assert model.a.weight.grad is None
    assert model.b.weight.grad is not None


def test_dropout_stays_only_where_it_does_something() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Dropout(0.0))
    x = (torch.zeros(2, 4),)
    assert [n.op for n in trace_model(model, x).graph.nodes] == ["aten.linear.default", "aten.dropout.default"]
    assert [n.op for n in trace_model(model.eval(), x).graph.nodes] == ["aten.linear.default"]


def test_prelude_is_computed_once() -> None:
    graph = trace_model(hf_llama(), {"input_ids": tokens(67, 2, 8)}).graph
    free = [repr((n.op, n.args, n.kwargs)) for n in graph.nodes if "param:" not in repr(n.args)]
    assert len(free) == len(set(free))


class Several(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.name = name

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {self.name: y.sum(), "aux": y.mean(), "count": x.sum()}


def test_loss_is_the_one_called_loss_among_several() -> None:
    x = (torch.zeros(2, 4),)
    assert trace_model(Several("loss"), x).graph.loss == "sum"
    assert trace_model(Several("other"), x).graph.loss is None


def test_batch_dims_are_found_by_growing_the_batch() -> None:
    def inputs(batch_size: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(3, batch_size), "table": torch.zeros(3, 2), "y": torch.zeros(batch_size)}

    assert find_batch_dims(inputs, 3) == (1, None, 0)
    with pytest.raises(InputError, match="one dim at most"):
        find_batch_dims(lambda b: (torch.zeros(b, b),), 2)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return x + 1


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("wrong size")


class Complex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(x).abs()


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> object:
        return object()


class HiddenNoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                x = self.layer(x)
            return self.layer(x)


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branches(), r"(?s)Branches cannot be traced.*test_capture.py:\d+, in forward.*torch.where"),
        (Raises(), r"(?s)RuntimeError: wrong size.*test_capture.py:\d+, in forward"),
        (nn.Linear(3, 2), r"(?s)Linear cannot be traced: RuntimeError"),
        (nn.BatchNorm1d(2), r"BatchNorm1d .* changes its buffer .*GroupNorm"),
        (Complex(), r"dtype complex64.*real tensors"),
        (Writes(), "writes to its input"),
        (Unknown(), "returns a object"),
        (HiddenNoGrad(), "no_grad inside autocast"),
        (Item(), r"not a tensor"),
    ],
)
def test_what_cannot_be_traced_says_why(model: nn.Module, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace_model(model, (torch.zeros(4, 2),))


def test_inputs_without_batch_are_refused() -> None:
    with pytest.raises(TraceError, match="no input has a batch dim"):
        trace_model(nn.Linear(2, 2), (torch.zeros(4, 2),), batch_dims=(None,))
