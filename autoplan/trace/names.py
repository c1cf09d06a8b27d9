"""Names of parameters and buffers: one canonical name for each tensor, whatever else it is called."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from autoplan.errors import TraceError
from autoplan.ir import DTYPE_BYTES, Param, TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNames:
    """What the tensors of a module are called in a graph."""

    params: tuple[Param, ...]
    values: dict[str, str]
    """Any name in the module (``lm_head.weight``) to the value (``param:wte.weight``)."""


def model_names(model: nn.Module) -> ModelNames:
    """Name the tensors of a module; the first name in ``named_parameters`` is canonical, the others are aliases."""
    tensors = _by_identity(model.named_parameters(remove_duplicate=False))
    params = []
    values: dict[str, str] = {}
    for names, tensor in tensors:
        meta = tensor_meta(tensor, f"parameter {names[0]}")
        params.append(Param(name=names[0], meta=meta, trainable=tensor.requires_grad, aliases=names[1:]))
        values |= {name: f"param:{names[0]}" for name in names}
    for names, _ in _by_identity(model.named_buffers(remove_duplicate=False)):
        values |= {name: f"buffer:{names[0]}" for name in names}
    return ModelNames(params=tuple(params), values=values)


def tensor_meta(tensor: Tensor, where: str) -> TensorMeta:
    """Shape and dtype of a tensor; ``where`` says in a refusal what it is."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise TraceError(
            f"{where} has dtype {dtype}, which autoplan does not plan; known dtypes: {', '.join(DTYPE_BYTES)}. "
            "Write complex arithmetic with real tensors (rotary embeddings: cos and sin)."
        )
    if not all(isinstance(size, int) for size in tensor.shape):
        raise TraceError(f"{where} has a size that depends on the data: {list(tensor.shape)}. Pad it to a fixed size.")
    return TensorMeta(shape=tuple(tensor.shape), dtype=dtype)


def _by_identity(named: Iterable[tuple[str, Tensor]]) -> list[tuple[tuple[str, ...], Tensor]]:
    names: dict[int, tuple[str, ...]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        names[id(tensor)] = (*names.get(id(tensor), ()), name)
        tensors[id(tensor)] = tensor
    return [(names[key], tensor) for key, tensor in tensors.items()]
