"""Parameters taken out of layers that will not be traced: torch.export spends milliseconds on each that it sees.

What the layer had is remembered as tokens. While the model runs, any look at the parameters of such a layer fails.
"""

from collections.abc import Callable, Hashable, Iterator

from torch import Tensor, nn


class Stripped(dict[str, Tensor | None]):
    """Stands in ``_parameters`` of a module: empty, and ``seen`` is called when something looks for what was there."""

    def __init__(self, tokens: tuple[tuple[str, Hashable], ...], seen: Callable[[], None]) -> None:
        """Remember the names and tokens of what was there."""
        super().__init__()
        self.tokens = tokens
        self.seen = seen
        self._names = frozenset(name for name, _ in tokens)

    def __contains__(self, name: object) -> bool:
        """Modules look here first for each of their attributes."""
        if name in self._names:
            self.seen()
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Tensor | None:
        """Look up."""
        self.seen()
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        """Put something new there."""
        self.seen()
        super().__setitem__(name, value)

    def __iter__(self) -> Iterator[str]:
        """Go over the names."""
        self.seen()
        return super().__iter__()

    def __len__(self) -> int:
        """Count."""
        self.seen()
        return super().__len__()

    def get(self, name: str, default: object = None) -> object:  # type: ignore[override]
        """Look up."""
        self.seen()
        return super().get(name, default)

    def keys(self):  # type: ignore[no-untyped-def]
        """Go over the names."""
        self.seen()
        return super().keys()

    def values(self):  # type: ignore[no-untyped-def]
        """Go over the tensors."""
        self.seen()
        return super().values()

    def items(self):  # type: ignore[no-untyped-def]
        """Go over both."""
        self.seen()
        return super().items()


def strip(layer: nn.Module, token: Callable[[object], Hashable], seen: Callable[[], None]) -> None:
    """Take the parameters out of a layer."""
    for module in layer.modules():
        parameters = vars(module)["_parameters"]
        if parameters and not isinstance(parameters, Stripped):
            tokens = tuple((name, token(parameter)) for name, parameter in parameters.items())
            vars(module)["_parameters"] = Stripped(tokens, seen)
