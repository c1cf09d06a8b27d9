import json
from pathlib import Path

import pytest
from torch import nn
from trace_models import EXAMPLES

from autoplan.errors import InputError
from autoplan.trace.capture import trace_model
from autoplan.trace.compat import is_fake
from autoplan.trace.inputs import find_batch_dims
from autoplan.trace.segments import segment_graph
from autoplan.trace.source import load_model

LINEAR = "from torch import nn, zeros\ndef build_model(): return nn.Linear(2, 2)\n"
INPUTS = "def example_inputs(batch_size): return (zeros(batch_size, 2),)\n"
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "hidden_size": 32, "intermediate_size": 64, "vocab_size": 67, "max_position_embeddings": 32}  # fmt: skip


def write(folder: Path, text: str, name: str = "model.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", ["nanogpt.py", "llama.py", "nanogpt.py:build_model"])
def test_example_is_built_without_weights_and_traced(name: str) -> None:
    source = load_model(str(EXAMPLES / name))
    model = source.build()
    assert all(is_fake(p) for p in model.parameters())
    assert not any(is_fake(p) for p in source.build_real().parameters())
    inputs = source.example_inputs(4)
    traced = trace_model(model, inputs, batch_dims=find_batch_dims(source.example_inputs, 4))
    real = trace_model(source.build_real(), source.real_inputs(4))
    assert traced.graph.digest == real.graph.digest


def test_hf_config_of_a_large_model_needs_no_memory(tmp_path: Path) -> None:
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}  # fmt: skip
    source = load_model(write(tmp_path, json.dumps(large), "config.json"))
    assert any("sequence length 2048" in note for note in source.notes)
    inputs = source.example_inputs(8)
    graph = trace_model(source.build(), inputs, dtype="bfloat16").graph
    assert graph.inputs[0].meta.shape == (8, 2048)
    assert graph.params[0].meta.dtype == "bfloat16"
    assert segment_graph(graph).kind_names == ("embed", "block", "head")


def test_seq_len_of_a_config(tmp_path: Path) -> None:
    spec = write(tmp_path, json.dumps(LLAMA), "config.json")
    inputs = load_model(spec, seq_len=8).example_inputs(2)
    assert isinstance(inputs, dict)
    assert tuple(inputs["labels"].shape) == (2, 8)
    with pytest.raises(InputError, match="max_position_embeddings 32"):
        load_model(spec, seq_len=64)


def test_seq_len_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no parameter seq_len"):
        load_model(write(tmp_path, LINEAR + INPUTS), seq_len=8)
    text = LINEAR + "def example_inputs(batch_size, seq_len=4): return (zeros(batch_size, seq_len, 2),)\n"
    inputs = load_model(write(tmp_path, text), seq_len=8).example_inputs(3)
    assert isinstance(inputs, tuple)
    assert tuple(inputs[0].shape) == (3, 8, 2)


def test_constructor_that_reads_values_falls_back_to_real_weights(tmp_path: Path) -> None:
    text = (
        "import torch\nfrom torch import nn, zeros\ndef build_model(): return nn.Linear(2, int(torch.ones(3).sum()))\n"
    )
    model = load_model(write(tmp_path, text + INPUTS)).build()
    assert isinstance(model, nn.Linear)
    assert model.out_features == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def build_model(:\n", r"model.py:1: syntax error"),
        ("x = 1\ny = x / 0\n", r"(?s)cannot be imported: ZeroDivisionError.*model.py:2"),
        ("import no_such_module_here\n", r"(?s)ModuleNotFoundError.*model.py:1"),
        (INPUTS, r"no function build_model\(\) -> nn.Module"),
        (LINEAR, r"no function example_inputs\(batch_size\)"),
        ("def build_model(): return 3\n" + INPUTS, "must return an nn.Module, it returned int"),
        ("def build_model():\n    raise KeyError('a')\n" + INPUTS, r"(?s)building the model failed: KeyError.*:2"),
        (LINEAR + "def example_inputs(b): return 3\n", "example_inputs must return a dict"),
        (LINEAR + "def example_inputs(b): return (3,)\n", "no tensor"),
        (LINEAR + "def example_inputs(b):\n    raise OSError('gone')\n", r"(?s)example_inputs failed: OSError.*:4"),
    ],
)
def test_broken_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        source = load_model(write(tmp_path, text))
        source.build()
        source.example_inputs(2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "model_type"),
        ('{"model_type": "no_such_model"}', "is not a config that transformers"),
    ],
)
def test_broken_config_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(write(tmp_path, text, "config.json"))


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        load_model(str(tmp_path / "none.py"))
    with pytest.raises(InputError, match="a Python file"):
        load_model(str(tmp_path / "model.txt"))
    with pytest.raises(InputError, match="no function other"):
        load_model(write(tmp_path, LINEAR + INPUTS) + ":other")
