"""What the user names on the command line -> ``ModelSource``: how to build the model and its example inputs.

In: ``model.py``, ``model.py:factory`` or the ``config.json`` of a Hugging Face causal language model. Out: functions
that build, without allocating weights when the model allows it.
"""

import contextlib
import hashlib
import importlib.util
import inspect
import io
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from autoplan.errors import InputError
from autoplan.trace.blame import line_of_error
from autoplan.trace.compat import fake_mode
from autoplan.trace.inputs import Inputs, as_call
from autoplan.trace.tree import flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model that can be built, and inputs for it at any batch size."""

    name: str
    """File and factory, for people: ``nanogpt.py:build_model``."""
    build: Callable[[], nn.Module]
    """Builds the model without weights (fake tensors) when its constructor allows it."""
    example_inputs: Callable[[int], Inputs]
    """Inputs at a batch size, fake when possible: only their shapes matter."""
    build_real: Callable[[], nn.Module]
    """Builds the model with weights, to run it."""
    real_inputs: Callable[[int], Inputs]
    """Inputs with values, to run it."""
    notes: tuple[str, ...] = ()


def load_model(spec: str, *, seq_len: int | None = None) -> ModelSource:
    """Find the model that ``spec`` names: ``file.py``, ``file.py:factory`` or a Hugging Face ``config.json``.

    ``seq_len`` replaces the file's own sequence length; a file takes part by giving ``example_inputs`` a parameter of
    that name. Raises InputError, with the user's line where there is one.
    """
    if seq_len is not None and seq_len < 1:
        raise InputError(f"--seq-len must be at least 1, found {seq_len}")
    file, _, factory = spec.partition(":") if not Path(spec).is_file() else (spec, "", "")
    path = Path(file)
    if path.suffix not in (".py", ".json"):
        raise InputError(
            f"a model is a Python file (model.py or model.py:factory) or a Hugging Face config.json, found {spec!r}"
        )
    if not path.is_file():
        raise InputError(f"there is no file {file!r} (looked in {path.absolute().parent})")
    if path.suffix == ".json":
        from autoplan.trace.huggingface import hf_functions  # needs transformers only when it is asked for

        build, inputs, notes = hf_functions(path, seq_len)
        return _source(path.parent.name or path.name, build, inputs, notes)
    module = _import(path)
    build = _function(module, factory or "build_model", path)
    inputs = _with_seq_len(_function(module, "example_inputs", path), seq_len, path)
    return _source(f"{path.name}:{factory or 'build_model'}", build, inputs, ())


def _source(
    name: str, build: Callable[..., object], inputs: Callable[..., object], notes: tuple[str, ...]
) -> ModelSource:
    """Wrap raw user functions: weightless first, checked results, errors with the user's line."""
    return ModelSource(
        name=name,
        build=lambda: _checked_model(_weightless_first(build, f"{name}: building the model")),
        example_inputs=lambda batch: _checked_inputs(
            _weightless_first(lambda: inputs(batch), f"{name}: example_inputs")
        ),
        build_real=lambda: _checked_model(_call(build, f"{name}: building the model")),
        real_inputs=lambda batch: _checked_inputs(_call(lambda: inputs(batch), f"{name}: example_inputs")),
        notes=notes,
    )


def _import(path: Path) -> ModuleType:
    """Run a Python file as a module of its own; modules beside it can be imported by it."""
    unique = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    module_spec = importlib.util.spec_from_file_location(f"autoplan_model_{unique}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a class's module up here
    sys.path.insert(0, str(path.resolve().parent))
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"{error.filename or path}:{error.lineno or 1}: syntax error: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise InputError(_failure(f"{path} cannot be imported", error)) from error
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _function(module: ModuleType, name: str, path: Path) -> Callable[..., object]:
    found = getattr(module, name, None)
    if not callable(found):
        shapes = {"example_inputs": "example_inputs(batch_size) -> dict or tuple of tensors"}
        raise InputError(f"{path} has no function {shapes.get(name, f'{name}() -> nn.Module')}; define it there")
    checked: Callable[..., object] = found
    return checked


def _with_seq_len(inputs: Callable[..., object], seq_len: int | None, path: Path) -> Callable[[int], object]:
    if seq_len is None:
        return inputs
    if "seq_len" not in inspect.signature(inputs).parameters:
        raise InputError(
            f"--seq-len {seq_len} was given, but example_inputs in {path} has no parameter seq_len; "
            "add one, or leave --seq-len out"
        )
    return lambda batch_size: inputs(batch_size, seq_len=seq_len)


def _weightless_first(call: Callable[[], object], what: str) -> object:
    """Call with fake tensors; a constructor that reads values of tensors is called again for real."""
    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()), fake_mode():
            warnings.simplefilter("ignore")
            return call()
    except (Exception, SystemExit):
        torch.set_rng_state(state)
        return _call(call, what)


def _call(call: Callable[[], object], what: str) -> object:
    try:
        return call()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(_failure(f"{what} failed", error)) from error


def _failure(what: str, error: BaseException) -> str:
    """What failed and the user's line; torch adds its C++ frames to a message, which stay out."""
    where = line_of_error(error)
    said = str(error).split("\nException raised from")[0].strip()
    return f"{what}: {type(error).__name__}: {said}" + (f"\n  at {where}" if where else "")


def _checked_model(found: object) -> nn.Module:
    if not isinstance(found, nn.Module):
        raise InputError(f"the model's factory must return an nn.Module, it returned {type(found).__name__}")
    return found


def _checked_inputs(found: object) -> Inputs:
    if not isinstance(found, (Mapping, tuple, list)):
        raise InputError(
            f"example_inputs must return a dict (keyword arguments) or a tuple (positional ones), "
            f"it returned {type(found).__name__}; write (x,) for a single input"
        )
    args, kwargs = as_call(found)
    if not any(isinstance(leaf, Tensor) for leaf in flatten((*args, kwargs))[0]):
        raise InputError("example_inputs returned no tensor; the model needs at least one to be traced")
    return found
