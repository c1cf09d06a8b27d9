"""A folded trace is the full trace, and a model for which that is not certain is traced in full."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import fold_models
import pytest
import torch
from torch import nn
from trace_models import hf_gpt2, hf_llama, hf_model, load_example
from trace_models import tokens as random_tokens

from autoplan.trace import capture, fold, reach, tokens, unfold
from autoplan.trace.capture import Traced, trace_model

IDS = random_tokens(67, 2, 16)


def full_trace(model: nn.Module, inputs: object) -> Traced:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "fold_layers", lambda _model, _stripping: None)
        return trace_model(model, inputs)  # type: ignore[arg-type]


def assert_same_trace(found: Traced, expected: Traced) -> None:
    for one, two in zip(found.graph.nodes, expected.graph.nodes, strict=True):
        assert one == two
    assert found.graph == expected.graph
    assert found.graph.digest == expected.graph.digest
    assert found.out_spec == expected.out_spec
    assert found.notes == expected.notes
    assert list(found.constants) == list(expected.constants)


def num_repeated(caplog: pytest.LogCaptureFixture) -> int:
    """Layer calls of the last trace that were not traced."""
    found = re.findall(r"traced \d+ calls of layers, (\d+) more|traced in full: ", caplog.text)
    return int(found[-1] or 0) if found else 0


def examples() -> dict[str, Callable[[], tuple[nn.Module, object]]]:
    def example(name: str) -> Callable[[], tuple[nn.Module, object]]:
        def make() -> tuple[nn.Module, object]:
            module = load_example(name)
            return module.build_model(), module.example_inputs(4)

        return make

    def hf(make: Callable[[int], nn.Module], **more: object) -> Callable[[], tuple[nn.Module, object]]:
        return lambda: (make(6), {"input_ids": IDS, "labels": IDS, **more})

    return {
        "nanogpt": example("nanogpt"),
        "llama": example("llama"),
        "hf_gpt2": hf(hf_gpt2),
        "hf_llama": hf(hf_llama),
        "hf_gemma2": hf(hf_gemma2),
        "hf_qwen3": hf(hf_qwen3),
    }


def hf_gemma2(num_layers: int) -> nn.Module:
    from transformers import Gemma2Config

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 67, "max_position_embeddings": 32}
    return hf_model(Gemma2Config(num_hidden_layers=2 * num_layers, **heads, **sizes))


def hf_qwen3(num_layers: int) -> nn.Module:
    from transformers import Qwen3Config

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 67, "max_position_embeddings": 32}
    return hf_model(Qwen3Config(num_hidden_layers=num_layers, **heads, **sizes))


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="autoplan.trace.capture")


@pytest.mark.parametrize("name", list(examples()))
def test_known_models_fold_to_their_full_trace(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = examples()[name]()
    traced = trace_model(model, inputs)  # type: ignore[arg-type]
    assert num_repeated(caplog) >= 2
    assert_same_trace(traced, full_trace(model, inputs))


def test_recorders_inside_layers_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    """transformers records what layers return with hooks in and on them."""
    model, inputs = hf_llama(6), {"input_ids": IDS, "output_hidden_states": True, "output_attentions": True}
    model.set_attn_implementation("eager")
    traced = trace_model(model, inputs)
    assert num_repeated(caplog) == 0
    assert_same_trace(traced, full_trace(model, inputs))
    assert len(traced.graph.outputs) == 1 + 7 + 6


@pytest.mark.parametrize("kind", fold_models.FOLDED, ids=lambda kind: kind.__name__)
def test_layers_that_are_alike_are_repeated(kind: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = kind(), (torch.ones(3, 5, 4),)
    traced = trace_model(model, inputs)
    assert num_repeated(caplog) >= 2
    assert_same_trace(traced, full_trace(model, inputs))


@pytest.mark.parametrize("kind", fold_models.IN_PART + fold_models.IN_FULL, ids=lambda kind: kind.__name__)
def test_layers_that_differ_are_traced_themselves(kind: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = kind(), (torch.ones(3, 5, 4),)
    traced = trace_model(model, inputs)
    repeated = num_repeated(caplog)
    assert repeated < fold_models.LAYERS - 2
    assert repeated == 0 or kind in fold_models.IN_PART
    assert_same_trace(traced, full_trace(model, inputs))


def _blind(_reached: object) -> str:
    return "nothing outside"


def _any_tree(layer: nn.Module, _varying: object) -> object:
    return type(layer), [(name, p.shape, p.requires_grad) for name, p in layer.named_parameters()].__repr__()


@contextmanager
def _shown(_fold: object, _layer: object) -> Iterator[None]:
    yield


GUARDS: dict[str, tuple[object, str, object, tuple[type[nn.Module], ...]]] = {
    "what the layer holds": (fold, "layer_token", _any_tree, (fold_models.SetsAttribute, fold_models.StochasticDepth)),
    "what its code reaches": (
        fold, "surroundings_token", _blind,
        (fold_models.GlobalCounter, fold_models.ClassCounter, fold_models.PythonRandom),
    ),
    "functions it holds": (
        tokens, "outside", lambda classes, _held: reach.outside(classes, ()), (fold_models.HeldFunction,)
    ),
    "parameters taken out": (fold.Fold, "miss", lambda _fold: None, (fold_models.SumsWeights,)),
    "numbers that vary": (fold, "_hidden", _shown, (fold_models.LateIndex, fold_models.ByIndex)),
    "hooks below": (tokens, "_refuse_hooks", lambda *_: None, (fold_models.HookInside,)),
    "closed regions": (unfold, "_check_closed", lambda *_: None, (fold_models.Constants,)),
    "shared writes": (
        capture, "refuse_shared_writes", lambda *_: None,
        (fold_models.WritesOutside, fold_models.WritesToView, fold_models.WritesToOneView),
    ),
}  # fmt: skip
"""A guard, how it is switched off, and models that are then traced wrong or not at all."""


@pytest.mark.parametrize(("guard", "kind"), [(name, kind) for name in GUARDS for kind in GUARDS[name][3]], ids=str)
def test_every_guard_is_needed(guard: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, blind, _ = GUARDS[guard]
    model, inputs = kind(), (torch.ones(3, 5, 4),)
    expected = full_trace(model, inputs)
    monkeypatch.setattr(module, name, blind)
    monkeypatch.setattr(unfold.Unfold, "_compare", lambda *_: None)  # it hides what the others let through
    assert trace_model(model, inputs).graph != expected.graph


def test_second_layer_is_compared_with_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Should a guard fail, a difference between the two that are traced is still seen."""
    monkeypatch.setattr(fold, "surroundings_token", _blind)
    model, inputs = fold_models.SecondCall(), (torch.ones(3, 5, 4),)
    expected = full_trace(model, inputs)
    assert_same_trace(trace_model(model, inputs), expected)
    assert "layers.1 computes something else than layers.0" in caplog.text
    monkeypatch.setattr(unfold.Unfold, "_compare", lambda *_: None)
    assert trace_model(model, inputs).graph != expected.graph


def test_model_stays_as_it_was() -> None:
    """What replaces forward, numbers and parameters is in a copy."""
    model = fold_models.HiddenStates()
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    trace_model(model, (torch.ones(3, 5, 4),))
    assert {path: dict(vars(module)) for path, module in model.named_modules()} == before


def test_depth_hardly_costs_nodes_in_the_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.export sees of a layer that is repeated is one node, and none of its parameters."""
    sizes: list[int] = []
    export = capture.export_program

    def counting(*args: object) -> torch.export.ExportedProgram:
        program = export(*args)  # type: ignore[arg-type]
        sizes.append(len(program.graph.nodes))
        return program

    monkeypatch.setattr(capture, "export_program", counting)
    for layers in (8, 16):
        monkeypatch.setattr(fold_models, "LAYERS", layers)
        trace_model(fold_models.HiddenStates(), (torch.ones(3, 5, 4),))
    assert sizes[1] - sizes[0] == 8
