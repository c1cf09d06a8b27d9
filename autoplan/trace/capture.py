"""nn.Module + example inputs -> ``Traced``: the graph, and what is needed to call it like the module.

Parameters and inputs are fake while tracing, so nothing is computed and no weight is allocated. The user's module
is only read. Batch dims are counted in the order of the inputs as the caller gives them.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from autoplan.errors import TraceError
from autoplan.ir import Arg, Graph, GraphInput, Ref, refs_in, verify_graph
from autoplan.trace.attention import causal_without_mask
from autoplan.trace.collection import no_collection
from autoplan.trace.compat import fake_mode, is_fake
from autoplan.trace.experts import experts_as_one_op
from autoplan.trace.export import MODEL_PREFIX, Adapter, export_program
from autoplan.trace.fakes import disable_cache, fake_like, weightless_copy
from autoplan.trace.fold import CannotFold, Fold, fold_layers
from autoplan.trace.inputs import Baked, Inputs, InputSpec, as_call, checked_leaves, guess_batch_dims, input_spec
from autoplan.trace.lower import lower
from autoplan.trace.names import ModelNames, model_names, tensor_meta
from autoplan.trace.simplify import reached_by_params, simplify
from autoplan.trace.tree import Structure, flatten, leaf_paths, unflatten
from autoplan.trace.unfold import Unfold, find_regions, refuse_hidden_marks
from autoplan.trace.writes import refuse_shared_writes

log = logging.getLogger(__name__)

_CACHE_NOTE = "config.use_cache was switched off for the trace: the outputs hold no past_key_values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A graph and how to call it as the module was called."""

    graph: Graph
    in_spec: InputSpec
    out_spec: Structure
    training: bool
    constants: Mapping[str, Tensor]
    """Values of ``const:N``; those that were fake when traced are missing."""
    notes: tuple[str, ...]
    """What the user should know about the trace, in words."""


def trace_model(
    model: nn.Module, inputs: Inputs, *, batch_dims: Sequence[int | None] | None = None, dtype: str | None = None
) -> Traced:
    """Trace ``model`` (real, fake or on meta) as if called with ``inputs`` at the global batch size.

    ``batch_dims`` has one entry per tensor in ``inputs`` (see ``find_batch_dims``); None takes dim 0 of every tensor
    whose dim 0 equals the first tensor's. ``dtype`` traces what ``model.to(dtype)`` would compute; floating inputs
    follow it. Raises TraceError with the user's line when the model cannot be exported.
    """
    started = time.perf_counter()
    args, kwargs = as_call(inputs)
    leaves, spec = input_spec(model, args, kwargs)
    dims = _dims_by_leaf(leaves, flatten((*args, kwargs))[0], batch_dims)
    call = _Call(model=model, leaves=tuple(leaves), spec=spec, dims=tuple(dims), dtype=_torch_dtype(dtype))
    with no_collection():
        traced = _folded(call) or _trace(_copied(call), None)
    log.info(
        "traced %d nodes of %s in %.1f s",
        len(traced.graph.nodes), type(model).__name__, time.perf_counter() - started,
    )  # fmt: skip
    return traced


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    model: nn.Module
    leaves: tuple[object, ...]
    spec: InputSpec
    dims: tuple[int | None, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    """A call of a weightless copy of the model."""

    call: _Call
    adapter: Adapter
    examples: list[object]
    cache_off: bool
    names: ModelNames


def _copied(call: _Call) -> _Copied:
    with fake_mode():
        copied = weightless_copy(call.model, call.dtype)
        cache_off = disable_cache(copied)
        examples = [fake_like(leaf, call.dtype) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        return _Copied(
            call=call,
            adapter=Adapter(copied, call.spec),
            examples=examples,
            cache_off=cache_off,
            names=model_names(copied),
        )


def _folded(call: _Call) -> Traced | None:
    """Trace with repeated layers folded; None where there are none, or where the result would not be certain."""
    for stripping in (True, False):
        copied = _copied(call)
        fold = None
        try:
            fold = fold_layers(copied.adapter.model, stripping)
            if fold is None:
                return None
            traced = _trace(copied, fold)
            log.info("traced %d calls of layers, %d more are like them", len(fold.regions), len(fold.replays))
            return traced
        except Exception as error:  # whatever it is, the full trace will find it too, or does not have it
            if fold is None or not fold.missed:
                log.info("traced in full: %s", error)
                return None
            log.info("traced again: %s", error)
    return None


def _trace(copied: _Copied, fold: Fold | None) -> Traced:
    call, adapter = copied.call, copied.adapter
    if fold is not None:
        adapter.around = fold.runs
    with experts_as_one_op(adapter.model), causal_without_mask():
        tensors = [leaf for leaf in copied.examples if isinstance(leaf, Tensor)]
        program = export_program(adapter, tensors, None if fold is None else partial(_check_writes, fold, copied.names))
    out_spec = adapter.returned.structure
    assert out_spec is not None
    if fold is not None:
        fold.refuse_stand_ins(leaf[0] for leaf in adapter.returned.baked if leaf is not None)
    entries = _graph_inputs(call.spec, copied.examples, call.dims)
    graph, constants = _build_graph(program, adapter.returned.baked, copied.names, entries, fold)
    graph = _with_loss(graph, out_spec)
    verify_graph(graph)
    return Traced(
        graph=graph,
        in_spec=call.spec,
        out_spec=out_spec,
        training=call.model.training,
        constants=constants,
        notes=(_CACHE_NOTE,) if copied.cache_off else (),
    )


def flatten_inputs(traced: Traced, args: Sequence[object], kwargs: Mapping[str, object]) -> list[Tensor]:
    """Tensors of a call in the order of ``graph.inputs``; InputError where the call differs from the traced one."""
    return checked_leaves(traced.in_spec, args, kwargs)


def unflatten_outputs(traced: Traced, leaves: Sequence[object]) -> object:
    """Put values for ``graph.outputs`` back into what the module returns (tuple, dict, dataclass, ModelOutput)."""
    return unflatten(traced.out_spec, leaves)


def _torch_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
    if name not in found:
        raise TraceError(f"dtype must be one of {', '.join(found)}, found {name!r}")
    return found[name]


def _dims_by_leaf(
    leaves: list[object], given: list[object], batch_dims: Sequence[int | None] | None
) -> list[int | None]:
    """Batch dims for the leaves in signature order, from those of the tensors in the caller's order."""
    tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
    dims = guess_batch_dims(tensors) if batch_dims is None else tuple(batch_dims)
    if len(dims) != len(tensors):
        raise TraceError(f"batch_dims needs one entry per tensor input: {len(tensors)}, found {len(dims)}")
    if all(dim is None for dim in dims):
        raise TraceError("no input has a batch dim: give the model at least one tensor whose size is the batch size")
    by_tensor = {id(tensor): dim for tensor, dim in zip(tensors, dims, strict=True)}
    return [by_tensor[id(leaf)] if isinstance(leaf, Tensor) else None for leaf in leaves]


def _graph_inputs(spec: InputSpec, examples: list[object], dims: tuple[int | None, ...]) -> tuple[GraphInput, ...]:
    found: list[GraphInput] = []
    for path, leaf, dim in zip(leaf_paths(spec.structure), examples, dims, strict=True):
        if isinstance(leaf, Tensor):
            meta = tensor_meta(leaf, f"input {path}")
            found.append(GraphInput(value=f"input:{len(found)}", path=path, meta=meta, batch_dim=dim))
    return tuple(found)


def _build_graph(
    program: torch.export.ExportedProgram, baked: Baked, names: ModelNames, inputs: tuple[GraphInput, ...],
    fold: Fold | None,
) -> tuple[Graph, dict[str, Tensor]]:  # fmt: skip
    placeholders = _placeholders(program, names)
    stand = None if fold is None else _unfold(program, fold, names)
    nodes, flat = lower(program.graph_module, placeholders, MODEL_PREFIX, stand)
    assert isinstance(flat, tuple)
    incoming = iter(flat)
    simple = simplify(nodes, tuple(next(incoming) if leaf is None else _plain(leaf[0]) for leaf in baked))
    read = {name for node in simple.nodes for name in node.operands} | set(refs_in(simple.outputs))
    tensors = {value: tensor for value, tensor in _constants(program, placeholders) if value in read}
    graph = Graph(
        nodes=simple.nodes,
        params=names.params,
        constants=tuple((value, tensor_meta(tensor, value)) for value, tensor in tensors.items()),
        inputs=inputs,
        outputs=simple.outputs,
        loss=None,
        batch_size=next(i.meta.shape[i.batch_dim] for i in inputs if i.batch_dim is not None),
    )
    real = {value: t for value, t in tensors.items() if value.startswith("const:") and not is_fake(t)}
    return graph, real


def _unfold(program: torch.export.ExportedProgram, fold: Fold, names: ModelNames) -> Unfold:
    """What lowers the folded layers; CannotFold where the result would not be certain."""
    if fold.broken:
        raise CannotFold(fold.broken)
    refuse_hidden_marks(program.graph_module)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    tensors = {
        str(spec.target).removeprefix(f"{MODEL_PREFIX}."): nodes[spec.arg.name]
        for spec in program.graph_signature.input_specs
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
    }
    values: dict[str, Arg] = {name: Ref(value) for name, value in names.values.items()}
    return Unfold(fold=fold, regions=find_regions(program.graph, fold, tensors), tensors=tensors, values=values)


def _check_writes(fold: Fold, names: ModelNames, program: torch.export.ExportedProgram) -> None:
    refuse_shared_writes(program.graph_module, _unfold(program, fold, names).regions)


def _placeholders(program: torch.export.ExportedProgram, names: ModelNames) -> dict[str, Arg]:
    """Value of every placeholder, by its name."""
    found: dict[str, Arg] = {}
    num_inputs = num_constants = 0
    for spec in program.graph_signature.input_specs:
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                value = names.values[str(spec.target).removeprefix(f"{MODEL_PREFIX}.")]
            case InputKind.CONSTANT_TENSOR:
                value, num_constants = f"const:{num_constants}", num_constants + 1
            case InputKind.USER_INPUT:
                value, num_inputs = f"input:{num_inputs}", num_inputs + 1
            case _:
                raise TraceError(f"the model uses {spec.kind.name.lower()} {spec.target}, which a graph cannot hold")
        found[spec.arg.name] = Ref(value)
    return found


def _constants(program: torch.export.ExportedProgram, placeholders: Mapping[str, Arg]) -> Iterator[tuple[str, Tensor]]:
    """Buffers and constants with their tensors, in placeholder order."""
    held = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        value = placeholders[spec.arg.name]
        if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            assert isinstance(value, Ref) and spec.target is not None
            yield value.name, held[spec.target]


def _plain(leaf: object) -> Arg:
    """An output that is not a tensor."""
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise TraceError(
        f"the model returns a {type(leaf).__name__}, which autoplan cannot rebuild. Return tensors, numbers, or "
        "tuples, lists, dicts and dataclasses of them. (A Hugging Face cache: pass use_cache=False.)"
    )


def _with_loss(graph: Graph, out_spec: Structure) -> Graph:
    """Name the loss: the only scalar float output that a parameter reaches, or the one called ``loss``."""
    reached = reached_by_params(graph.nodes)
    found = {}
    for path, arg in zip(leaf_paths(out_spec), graph.outputs, strict=True):
        meta = graph.metas[arg.name] if isinstance(arg, Ref) and arg.name in reached else None
        if isinstance(arg, Ref) and meta is not None and meta.is_float and meta.shape == ():
            found[path] = arg.name
    if len(set(found.values())) == 1:
        return replace(graph, loss=next(iter(found.values())))
    return replace(graph, loss=found.get("loss"))
