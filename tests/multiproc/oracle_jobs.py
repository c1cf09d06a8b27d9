"""What each rank does in the oracle tests: run a plan, and compare everything with the plain model in one process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.distributed as dist
import zoo
from multiproc.counting import CollectiveCounter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoplan
from autoplan import api
from autoplan.runtime.data import StageModule
from autoplan.runtime.regather import _Gathered
from autoplan.runtime.skeleton import signature
from autoplan.trace.capture import Traced, trace_model

TOLERANCE = 1e-10
STEPS = 3
RATE = 1e-2
Named = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the plain model gives."""

    losses: list[Tensor]
    grads: Named
    norm: Tensor
    weights: Named
    evaluated: list[Tensor]


@cache
def reference(name: str, batch_size: int) -> Reference:
    with zoo.InFloat64():
        return _reference(name, batch_size)


def _reference(name: str, batch_size: int) -> Reference:
    model = zoo.build(name)
    entry = zoo.ZOO[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, grads, norm = [], {}, torch.zeros(())
    for step in range(STEPS):
        loss = loss_of(model(**entry.batch(batch_size, step)))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        losses.append(loss.detach())
        optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = tensors_in(model(**entry.eval_inputs(entry.batch(batch_size, 9))))
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return Reference(losses=losses, grads=grads, norm=norm, weights=weights, evaluated=evaluated)


def loss_of(output: object) -> Tensor:
    loss = output[1] if isinstance(output, tuple) else output.loss  # type: ignore[attr-defined]
    assert isinstance(loss, Tensor)
    return loss


def tensors_in(output: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(output)
    return [x for x in leaves if isinstance(x, Tensor)]


Issued = dict[tuple[str, str], int]


def agree(name: str, plan: autoplan.Plan, batch_size: int, mutation: str = "") -> tuple[list[str], int, Issued]:
    """Differences above the tolerance, in words (none when planned and plain run agree); this rank's stage; and the
    collectives that it issued in its second step by axis and kind (the first step also agrees on shapes).
    """
    expected = reference(name, batch_size)
    entry = zoo.ZOO[name]
    found: list[str] = []

    def compare(what: str, got: Tensor, want: Tensor) -> None:
        if got.shape != want.shape:
            found.append(f"{what}: shape {list(got.shape)}, expected {list(want.shape)}")
            return
        error = (got - want).abs().max().item() if got.numel() else 0.0
        if not error <= TOLERANCE:
            found.append(f"{what}: off by {error:.3g}")

    with (
        zoo.InFloat64(),
        (MUTATIONS | _SPECIAL)[mutation](),
        _patched(api, "trace_model", lambda _: partial(_traced_once, name)),
    ):
        model = autoplan.compile(zoo.build(name), plan)
        counter = CollectiveCounter(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        for step in range(STEPS):
            with counter if step == 1 else nullcontext():
                loss = loss_of(model(**entry.batch(batch_size, step)))
                optimizer.zero_grad()
                loss.backward()
            compare(f"loss {step}", loss.detach(), expected.losses[step])
            if step == 0:
                for n, p in model.named_parameters():
                    compare(f"gradient of {n}", full(p.grad), expected.grads[n])
            norm = autoplan.clip_grad_norm_(model.parameters(), 0.5 if step else 1e9)
            if step == 0:
                compare("gradient norm", norm, expected.norm)
            optimizer.step()
        for n, p in model.named_parameters():
            compare(f"weight {n}", full(p.detach()), expected.weights[n])
        model.eval()
        with torch.no_grad():
            outputs = tensors_in(model(**entry.eval_inputs(entry.batch(batch_size, 9))))
        assert len(outputs) == len(expected.evaluated)
        for i, (got, want) in enumerate(zip(outputs, expected.evaluated, strict=True)):
            compare(f"eval output {i}", got, want)
    check_names(model, zoo.build(name))
    return found, model._ranks.pp.coordinate, dict(counter.seen)


_TRACES: dict[tuple[object, ...], Traced] = {}


def _traced_once(name: str, model: nn.Module, inputs: Mapping[str, object]) -> Traced:
    """Trace as usual, once per process, model, mode and shapes: most of a job's time would go there."""
    key = (name, model.training, signature((), inputs))
    if key not in _TRACES:
        _TRACES[key] = trace_model(model, inputs)
    return _TRACES[key]


def check_names(model: nn.Module, plain: nn.Module) -> None:
    """All ranks together have the user's names, and parameters are DTensors."""
    assert all(isinstance(p, DTensor) for p in model.parameters())
    gathered: list[list[str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, list(model.state_dict()))
    assert {n for names in gathered for n in names or []} == set(plain.state_dict())


def full(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _patched(owner: object, name: str, change: Callable[..., object]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, change(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _scaled_gradient(original: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
    def take(self: StageModule) -> dict[str, Tensor]:
        grads = original(self)
        name = sorted(grads)[0]
        return {**grads, name: grads[name] * 8}

    return take


def _skipped_reduction(original: Callable[..., None]) -> Callable[..., None]:
    def skip(self: StageModule, grads: dict[str, Tensor], names: list[str], axis: object) -> None:
        return None

    return skip


def _swapped_shards(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Exchange the halves of the first parameter that a rank loads."""

    def read(self: StageModule, name: str) -> Tensor:
        local = original(self, name)
        if name == sorted(self.names)[0]:
            middle = local.shape[0] // 2
            return torch.cat([local[middle:], local[:middle]])
        return local

    return read


MUTATIONS: dict[str, Callable[[], object]] = {
    "": _nothing,
    "scale one gradient by 8": lambda: _patched(StageModule, "take_gradients", _scaled_gradient),
    "skip the gradient reductions": lambda: _patched(StageModule, "_sum_by_segment", _skipped_reduction),
    "swap two shards": lambda: _patched(StageModule, "local", _swapped_shards),
}


def losses_in(name: str, plan: autoplan.Plan, dtype: torch.dtype, batch_size: int) -> list[tuple[float, float]]:
    """Planned and plain loss of three steps in a dtype that trains are run in."""
    plain = zoo.build(name).to(dtype)
    model = autoplan.compile(plain, plan)
    pairs = []
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    for step in range(STEPS):
        batch = zoo.ZOO[name].batch(batch_size, step)
        losses = [loss_of(m(**batch)) for m in (model, plain)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        pairs.append((losses[0].item(), losses[1].item()))
    return pairs


STALE_GATHER = "read zeros for what is gathered again"
_SPECIAL = {STALE_GATHER: lambda: _patched(_Gathered, "read", lambda read: lambda self: torch.zeros_like(read(self)))}
"""Mutations that only some plans can notice."""
