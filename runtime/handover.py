"""What a training step returns: the loss with the step's gradients behind it, and stand-ins for the rest."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from autoplan.errors import InputError

Gradient = Callable[[Tensor], Tensor]
"""From the gradient of the loss to the gradient of one parameter."""


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Gradient | None], *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward() was called twice on the loss of one step: call the model again first")
        gradients, ctx.gradients = ctx.gradients, None
        return (None, None, *(None if g is None else g(grad) for g in gradients))


def with_gradients(loss: Tensor, params: Sequence[nn.Parameter], gradients: Sequence[Gradient | None]) -> Tensor:
    """The loss as a tensor whose ``backward()`` accumulates ``gradients``, times its own, into ``params``."""
    return _HandOver.apply(loss, gradients, *params)  # type: ignore[no-untyped-call,no-any-return]


class NotGathered:
    """Stands for an output that a training step leaves in pieces on its ranks; any use raises InputError."""

    def __init__(self, what: str) -> None:
        """``what`` names the output for the message."""
        self._what = what

    def __repr__(self) -> str:
        """Say what it is without raising."""
        return f"<{self._what}: not gathered in training>"

    def __getattr__(self, name: str) -> object:
        """Raise: there is no tensor here."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def _refuse(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise InputError(
            f"a training step returns the loss alone, but {self._what} was used: gathering it on every rank could cost "
            "more than the step. Call the model in eval() mode to get all outputs."
        )

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __torch_function__ = classmethod(lambda cls, *_args, **_kwargs: cls("an output of the model")._refuse())
