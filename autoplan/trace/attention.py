"""Hugging Face's causal attention, traced as it runs: with ``is_causal`` and no mask.

Under torch.export transformers builds a causal mask although nothing is masked beside, so that a graph holds for any
length, and one for packed sequences since it cannot look at positions without values. Our graphs hold for one length,
and a mask costs twice the time and a square of bytes. For the time of a trace it is told that nothing is exported,
positions that follow from no input are worked out, and keys and values are repeated for the query heads of their group
where it would leave that to the kernel: the sharding rules know heads that are alike. Padding, windows and packed
sequences keep their masks.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace

import numpy as np
from torch import Tensor, fx, nn

from autoplan.trace.compat import node_of, op_name

_MASKS = "transformers.masking_utils"
_FUNCTIONS = "transformers.modeling_utils"
_KERNEL = "transformers.integrations.sdpa_attention"


@contextlib.contextmanager
def causal_without_mask() -> Iterator[None]:
    """Have plain causal attention traced without a mask; transformers is put back as it was.

    Nothing happens where transformers is not loaded.
    """
    masks, functions = sys.modules.get(_MASKS), sys.modules.get(_FUNCTIONS)
    if masks is None or functions is None or _KERNEL not in sys.modules:
        yield
        return
    names = vars(masks)
    before = {name: names[name] for name in ("is_torchdynamo_exporting", "find_packed_sequence_indices")}
    packed = before["find_packed_sequence_indices"]
    names["is_torchdynamo_exporting"] = _never
    names["find_packed_sequence_indices"] = lambda at: None if _are_consecutive(at) else packed(at)
    registry = functions.ALL_ATTENTION_FUNCTIONS
    registry["sdpa"] = _attention
    try:
        yield
    finally:
        names.update(before)
        del registry["sdpa"]


def _never() -> bool:
    return False


def _are_consecutive(positions: Tensor) -> bool:
    """Whether positions count up by one, for certain: they follow from no input."""
    node = node_of(positions)
    values = None if node is None else _values(node)
    return values is not None and bool((np.diff(values, axis=-1) == 1).all())


def _values(node: fx.Node) -> np.ndarray | None:
    """Values of a tensor that is made from nothing by the usual ops of positions; None where it is not known."""
    first, rest = (node.args[0] if node.args else None), node.args[1:]
    name = op_name(node.target)
    if name in _RANGES and all(isinstance(arg, int) for arg in node.args):
        return np.arange(*node.args)  # type: ignore[arg-type]
    known = _values(first) if isinstance(first, fx.Node) and name in _POSITION_OPS else None
    if known is None or any(isinstance(arg, fx.Node) for arg in rest):
        return None
    return _POSITION_OPS[str(name)](known, *rest)


_RANGES = ("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
_POSITION_OPS: dict[str, Callable[..., np.ndarray]] = {
    "aten.add.Tensor": lambda values, other: values + other,
    "aten.unsqueeze.default": np.expand_dims,
    "aten.expand.default": lambda values, sizes: np.broadcast_to(values, _sizes(sizes, values.shape)),
}


def _sizes(asked: Sequence[int], had: tuple[int, ...]) -> list[int]:
    """Sizes after ``expand``, in which -1 leaves a size as it was."""
    before = (1,) * (len(asked) - len(had)) + had
    return [old if new == -1 else new for new, old in zip(asked, before, strict=True)]


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **more: object
) -> tuple[Tensor, None]:
    """What transformers calls for attention by torch's kernel."""
    kernel: ModuleType = sys.modules[_KERNEL]
    groups, caller = getattr(module, "num_key_value_groups", 1), module
    if attention_mask is None and groups > 1:
        key, value = kernel.repeat_kv(key, groups), kernel.repeat_kv(value, groups)
        caller = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # type: ignore[assignment]
    found: tuple[Tensor, None] = kernel.sdpa_attention_forward(caller, query, key, value, attention_mask, **more)
    return found
