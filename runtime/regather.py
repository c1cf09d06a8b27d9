"""Results of all-gathers that are not kept for the backward pass but gathered once more in it.

Autograd asks before it keeps a tensor: for one that lies in the memory of a gathered tensor it keeps where it lies
there, and this rank's part. The first such tensor that backward reads gathers the part again; the memory is freed when
the last one was read. What is gathered within ``gather_again`` stays alive until it ends, so that no other tensor can
lie at the same address.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class _Gathered:
    """One gathered tensor: how to make it again, and while it lives, itself."""

    again: Callable[[], Tensor]
    whole: Tensor | None
    readers: int = 0
    """Tensors in its memory that backward has not read yet."""

    def read(self) -> Tensor:
        """The tensor, gathered again by the first reader."""
        whole = self.again() if self.whole is None else self.whole
        self.readers -= 1
        self.whole = whole if self.readers > 0 else None
        return whole


@dataclass(frozen=True, slots=True)
class _Within:
    """A tensor in the memory of a gathered one."""

    gathered: _Gathered
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


_Record = dict[int, _Gathered]
_records: list[_Record] = []
"""Of the segment that runs, the innermost last. A plain list, which torch.compile can look into."""


def is_asked() -> bool:
    """Whether what is gathered now is to be gathered again."""
    return bool(_records)


def gathered(whole: Tensor, again: Callable[[], Tensor]) -> None:
    """Say that a tensor was all-gathered, and how to do it again; only where ``is_asked``."""
    _records[-1][whole.untyped_storage().data_ptr()] = _Gathered(again, whole)


def apart(made: Tensor) -> Tensor:
    """A tensor that a local move made, copied if it lies in the memory of a gathered one.

    It may on some ranks only (the first keeps what the others fill with zeros), and they must all gather the same.
    """
    return made.clone() if _records and made.untyped_storage().data_ptr() in _records[-1] else made


@contextmanager
def gather_again() -> Iterator[None]:
    """Within it, the backward pass keeps no results of all-gathers."""
    record: _Record = {}

    def pack(tensor: Tensor) -> Tensor | _Within:
        found = record.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        found.readers += 1
        return _Within(found, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    _records.append(record)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        _records.pop()
        for each in record.values():
            each.whole = None


def _unpack(kept: Tensor | _Within) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    return kept.gathered.read().as_strided(kept.size, kept.stride, kept.offset)
