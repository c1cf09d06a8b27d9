"""A stand-in for a number that differs from layer to layer (the number of the layer): it finds out if it is used."""


class VariesUsed(Exception):
    """Forward uses a number that differs from layer to layer."""


class Varies:
    """Can be passed on and compared with None; every other use of it raises, and is remembered if that is caught."""

    def __init__(self, name: str, number: int) -> None:
        """Remember whose number it is."""
        self._name, self._number = name, number
        self.used = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Answer isinstance as the number would."""
        return type(self._number)

    def __getattr__(self, name: str) -> object:
        """Refuse what numbers have beside their operators."""
        raise self._refusal()

    def _refusal(self) -> VariesUsed:
        self.used = True
        return VariesUsed(f"forward uses {self._name}, which differs from layer to layer")


def _refuse(self: Varies, *_args: object, **_kwargs: object) -> object:
    raise self._refusal()


_KEPT = ("__new__", "__getattribute__", "__doc__", "__sizeof__")
for _operator in [name for name in vars(int) if name.startswith("__") and name not in _KEPT]:
    setattr(Varies, _operator, _refuse)
