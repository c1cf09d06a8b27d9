"""Weightless module -> exported FX program whose ops write to nothing, or a TraceError that names the user's line."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from autoplan.errors import TraceError
from autoplan.trace.blame import line_of_error
from autoplan.trace.compat import INLINED_WRAPPERS, mutates, op_name, wrapper_name
from autoplan.trace.inputs import Baked, InputSpec, baked_leaves, bind
from autoplan.trace.tree import Structure, flatten, unflatten

_MIX = "A mixture of experts is one op: torch.ops.autoplan.experts, after `import autoplan.trace.experts_op`."
MODEL_PREFIX = "model"
"""Name of the user's module inside the exported one."""


@dataclass(slots=True)
class Returned:
    """What the exported module returned: its structure, and its leaves that are not tensors.

    Written while exporting. Not a list on the module: torch.export puts lists back as they were.
    """

    structure: Structure | None = None
    baked: Baked = ()


class Adapter(nn.Module):
    """Takes and returns flat tensors, so that torch.export meets no container type it does not know."""

    def __init__(self, model: nn.Module, spec: InputSpec) -> None:
        """Hold the (weightless) module under the name ``model``."""
        super().__init__()
        self.model = model
        self.spec = spec
        self.returned = Returned()
        self.around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        """What is entered while the module runs."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Call the module with the tensors in their places."""
        incoming = iter(tensors)
        leaves = [leaf[0] if leaf is not None else next(incoming) for leaf in self.spec.baked]
        named = unflatten(self.spec.structure, leaves)
        assert isinstance(named, dict)
        args, kwargs = bind(self.spec.signature, named)
        with self.around():
            out_leaves, out_spec = flatten(self.model(*args, **kwargs))
        self.returned.structure, self.returned.baked = out_spec, baked_leaves(out_leaves)
        return tuple(leaf for leaf in out_leaves if isinstance(leaf, Tensor))


def export_program(
    adapter: Adapter, tensors: list[Tensor], before: Callable[[torch.export.ExportedProgram], None] | None = None
) -> torch.export.ExportedProgram:
    """Export without in-place ops; buffers and inputs that the model writes to are refused.

    ``before`` sees the program while in-place ops are still in it, should there be any.
    """
    with _user_errors(type(adapter.model).__name__):
        program = torch.export.export(adapter, tuple(tensors), strict=False)
        _refuse_hidden_no_grad(program.graph_module)
        _detach_no_grad_regions(program.graph_module)
        if _needs_functional_form(program.graph_module):
            if before is not None:
                before(program)
            program = program.run_decompositions({})
    signature = program.graph_signature
    for name in signature.buffers_to_mutate.values():
        raise TraceError(_mutation(adapter.model, name.removeprefix("model.")))
    for position in signature.user_inputs_to_mutate.values():
        raise TraceError(f"the model writes to its input {position}; write to a clone of it instead")
    return program


def _mutation(model: nn.Module, buffer: str) -> str:
    path = buffer.rpartition(".")[0]
    kind = type(model.get_submodule(path)).__name__
    return (
        f"{kind} {path or '(the model itself)'} changes its buffer {buffer.rpartition('.')[2]!r} in forward. "
        "State that changes in every step cannot be split over ranks. "
        "Use a layer without running statistics (GroupNorm, LayerNorm)."
    )


def _needs_functional_form(module: fx.GraphModule) -> bool:
    """Whether anything writes in place, or autocast has to become explicit casts."""
    names = ("aten.batch_norm.default", "aten.instance_norm.default")
    for region in module.modules():
        assert isinstance(region, nn.Module)
        for node in region.graph.nodes if isinstance(region, fx.GraphModule) else ():
            if mutates(node.target) and op_name(node.target) != "aten.detach_.default":
                return True
            if op_name(node.target) in names or wrapper_name(node.target) == "wrap_with_autocast":
                return True
    return False


def _refuse_hidden_no_grad(module: fx.GraphModule) -> None:
    """torch.export forgets a no_grad inside autocast; all that is left of it is that the region is in pieces."""
    for graph_module in module.modules():
        nodes = graph_module.graph.nodes if isinstance(graph_module, fx.GraphModule) else ()
        calls = [n for n in nodes if op_name(n.target) is not None or wrapper_name(n.target) is not None]
        for one, two in zip(calls, calls[1:], strict=False):
            names = wrapper_name(one.target), wrapper_name(two.target)
            if names == (INLINED_WRAPPERS[1],) * 2 and one.args[:4] == two.args[:4]:
                raise TraceError(
                    "the model has two autocast regions in a row, or no_grad inside autocast; torch.export cannot tell "
                    "one from the other. Join the regions, or take no_grad out of autocast (use .detach() inside)."
                )


def _detach_no_grad_regions(module: fx.GraphModule) -> None:
    """Inlining a no_grad region would let gradients through, so detach what it returns."""
    for graph_module in module.modules():
        if isinstance(graph_module, fx.GraphModule):
            for node in list(graph_module.graph.nodes):
                if wrapper_name(node.target) == INLINED_WRAPPERS[0] and not node.args[0]:
                    _detach_results(node)
            graph_module.recompile()


def _detach_results(region: fx.Node) -> None:
    for item in list(region.users):
        readers = list(item.users)
        with region.graph.inserting_after(item):
            detached = region.graph.call_function(torch.ops.aten.detach.default, (item,))
        detached.meta = dict(item.meta)
        for reader in readers:
            reader.replace_input_with(item, detached)


@contextlib.contextmanager
def _user_errors(name: str) -> Iterator[None]:
    """Turn whatever export raises into a TraceError with the user's line, and silence torch meanwhile."""
    heard = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(heard), warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            yield
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(_explain(name, error)) from error
    finally:
        logging.disable(level)


def _explain(name: str, error: Exception) -> str:
    where = line_of_error(error)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    head = f"{name} cannot be traced: {type(error).__name__}: {first}"
    return f"{head}\n  at {where or 'an unknown line'}\n{_way_out(error)}"


def _way_out(error: Exception) -> str:
    text = f"{type(error).__name__} {error}"
    hints: tuple[tuple[str, str], ...] = (
        (
            "data-dependent",
            f"The model branches on values of a tensor. Use torch.where, or a loop of fixed length. {_MIX}",
        ),
        (
            "DataDependent",
            f"The model needs the values of a tensor (.item(), .tolist(), bool). Use tensors instead. {_MIX}",
        ),
        ("Cache", "Switch the key-value cache off (use_cache=False)."),
        ("same dtype", "Inputs and parameters have different dtypes; cast the inputs, or give --dtype."),
    )
    found = next((hint for sign, hint in hints if sign in text), None)
    return (
        found or "The model is traced with tensors that have shapes but no values; check that it runs on these inputs."
    )
