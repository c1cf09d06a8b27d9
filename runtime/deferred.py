"""A compiled model whose plan is searched at its first call."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from autoplan.errors import InputError

Build = Callable[[tuple[object, ...], Mapping[str, object]], nn.Module]


class DeferredModule(nn.Module):
    """Becomes the parallel module when it is first called; until then it has no parameters to give."""

    def __init__(self, build: Build) -> None:
        """``build`` makes the parallel module from the arguments of the first call."""
        super().__init__()
        self._build = build
        self._built: tuple[nn.Module, ...] = ()

    @property
    def _module(self) -> nn.Module:
        if not self._built:
            raise InputError(
                "the plan is searched at the first call, and the parameters exist after it: pass example_inputs= to "
                "autoplan.compile, or call the model once before making the optimizer"
            )
        return self._built[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Search and build at the first call, then run."""
        if not self._built:
            module = self._build(args, kwargs)
            self._built = (module.train(self.training),)
        return self._module(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As the built module's; InputError before the first call."""
        return self._module.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """As the built module's; InputError before the first call."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the built module's; InputError before the first call."""
        return self._module.load_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> "DeferredModule":
        raise InputError(
            "a compiled model cannot be moved or cast (.to, .cuda, .double, ...): do it before autoplan.compile"
        )

    def train(self, mode: bool = True) -> "DeferredModule":
        """Switch between training and evaluation."""
        self.training = mode
        for module in self._built:
            module.train(mode)
        return self
