"""The keywords of a search -> a Request; flags of the command line and Python callers say the same here."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict, cast

from autoplan.errors import InputError
from autoplan.plan.plan import DataMode, Precision, Recompute, ScheduleKind
from autoplan.solver.request import OptimizerName, Request

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


class Choices(TypedDict, total=False):
    """What a search may be told; one that is left out, or None, is left to the solver."""

    optimizer: OptimizerName
    """Whose states must fit; adamw unless given."""
    grad_dtype: str | None
    """bf16, fp32 or fp64, of gradients; the parameter's own unless given, as for the next two."""
    reduce_dtype: str | None
    """In which gradients are summed over ranks."""
    state_dtype: str | None
    """Of optimizer states."""
    master_dtype: str | None
    """Of a copy of the parameters that the optimizer updates; there is none unless given."""
    pp: int | None
    """Places on the pipeline axis; dp, cp and tp are the data, context and tensor degrees."""
    dp: int | None
    cp: int | None
    tp: int | None
    ep: int | None
    """Data ranks over which experts are split."""
    microbatch: int | None
    """Samples per microbatch and data rank."""
    recompute: Recompute | None
    schedule: ScheduleKind | None
    chunks: int | None
    """Stages per place on the pipeline axis."""
    data: DataMode | None
    """What data ranks share."""
    shards: int | None
    """Data ranks that share one copy of the states."""
    cuts: Sequence[int] | None
    """Positions in the chain of segments at which stages after the first begin."""
    offload: bool
    """Whether optimizer states may live in host memory."""
    pins: Sequence[str]
    """``PATTERN=tp:PLACEMENT``: where parameters must lie on the tensor axis."""
    forbid: Sequence[str]
    """What may not be: as ``pins``, or ``NAME=VALUE`` for another choice."""
    keep: Sequence[str]
    """Modules that the tensor axis leaves whole."""
    runnable: bool
    """Whether to leave out what this version cannot run."""
    gap: float | None
    """Share of the step within which the answer has to be proven optimal."""
    top: int | None
    """How many good plans to find."""
    time_limit_s: float | None


_PRECISION = {
    "grad_dtype": "gradients", "reduce_dtype": "reductions", "state_dtype": "states", "master_dtype": "master",
}  # fmt: skip
_LISTS = ("cuts", "pins", "forbid", "keep")
_LIMITS = ("gap", "top", "time_limit_s")
"""Keywords that say how long to search and not in what."""


def request_of(base: Request, choices: Choices) -> Request:
    """The base with all that was chosen. Raises TypeError for an unknown keyword, InputError for a bad value."""
    given = _given(choices)
    precision = Precision(**{_PRECISION[name]: dtype_name(given.pop(name)) for name in _PRECISION if name in given})
    options = replace(base.origin, options=flags_of(choices))
    return replace(base, precision=precision, origin=options, **given)


def flags_of(choices: Choices) -> tuple[tuple[str, str], ...]:
    """The choices that shape the space as flags of the command line, without dashes: ``("tp", "2")``."""
    found = []
    for name, value in _given(choices).items():
        values = value if isinstance(value, tuple) and name != "cuts" else (value,)
        flag = "pin" if name == "pins" else name.replace("_", "-")
        if name not in _LIMITS and value is not False:
            found += [(flag, _written(one)) for one in values]
    return tuple(found)


def choices_of(flags: Sequence[tuple[str, str]]) -> Choices:
    """The choices that such flags stand for, as a plan keeps them; the inverse of ``flags_of``."""
    found: dict[str, Any] = {}
    for flag, text in flags:
        name = "pins" if flag == "pin" else flag.replace("-", "_")
        if name in ("pins", "forbid", "keep"):
            found[name] = (*found.get(name, ()), text)
        elif name == "cuts":
            found[name] = tuple(map(int, text.split(","))) if text else ()
        elif name in Choices.__annotations__:
            found[name] = text == "true" if text in ("true", "false") else int(text) if text.isdigit() else text
        else:
            raise InputError(f"the plan was searched with --{flag}, which this version does not have: search again")
    return cast(Choices, found)


def _written(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case tuple():
            return ",".join(map(str, value))
        case _:
            return str(value)


def _given(choices: Choices) -> dict[str, Any]:
    """The choices that are made, in the order of ``Choices``; lists as tuples. ``Request`` checks the values."""
    known = Choices.__annotations__
    unknown = next((name for name in choices if name not in known), None)
    if unknown is not None:
        raise TypeError(f"a search has no keyword {unknown!r}; it has {', '.join(known)}")
    found: dict[str, object] = {name: choices.get(name) for name in known}
    return {name: _listed(name, value) for name, value in found.items() if value is not None}


def _listed(name: str, value: object) -> object:
    if name not in _LISTS:
        return value
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InputError(f"{name} is a list, found {value!r}; write [{value!r}]")
    return tuple(value)


def dtype_name(name: object) -> str:
    """The name that graphs use for ``bf16``, ``fp32`` or ``fp64``. Raises InputError for another."""
    if not isinstance(name, str) or name not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, found {name!r}")
    return DTYPES[name]
