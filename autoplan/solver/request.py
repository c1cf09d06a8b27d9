"""What the user asks for, beside the model and the cluster: pinned choices, optimizer, precision, time."""

from dataclasses import dataclass
from typing import Literal

from autoplan.errors import InputError
from autoplan.ir import DTYPE_BYTES
from autoplan.plan.plan import DATA_MODES, RECOMPUTE, SCHEDULES, DataMode, Origin, Precision, Recompute, ScheduleKind

OptimizerName = Literal["adamw", "sgd"]
OPTIMIZER_STATES: dict[OptimizerName, int] = {"adamw": 2, "sgd": 0}
"""Tensors of the parameter's shape that the optimizer keeps."""

GAP = 0.01
"""Default share of the step within which the answer has to be proven optimal."""
_COUNTS = ("pp", "dp", "cp", "tp", "ep", "microbatch", "shards", "chunks", "top")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Limits and pinned choices of one search. ``None`` leaves a choice to the solver."""

    model: str
    """Name for people; it is written in the plan."""
    dtype: str
    optimizer: OptimizerName = "adamw"
    precision: Precision = Precision()
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    tp: int | None = None
    ep: int | None = None
    microbatch: int | None = None
    """Samples per microbatch and data-parallel rank."""
    recompute: Recompute | None = None
    data: DataMode | None = None
    shards: int | None = None
    """Data ranks that share one copy of the states."""
    schedule: ScheduleKind | None = None
    chunks: int | None = None
    cuts: tuple[int, ...] | None = None
    """Positions in the chain of segments at which stages after the first begin."""
    offload: bool = False
    """Whether optimizer states may live in host memory."""
    pins: tuple[str, ...] = ()
    """``PATTERN=tp:PLACEMENT`` for parameters; see ``constraints``."""
    forbid: tuple[str, ...] = ()
    """What may not be: as ``pins``, or ``NAME=VALUE`` for a choice of level 0 or ``recompute``."""
    keep: tuple[str, ...] = ()
    """Modules that the tensor axis leaves whole."""
    runnable: bool = False
    """Whether to leave out what this version cannot run."""
    gap: float = GAP
    top: int = 1
    """How many good plans to find."""
    time_limit_s: float = 60.0
    origin: Origin = Origin()
    assumptions: tuple[tuple[str, str], ...] = ()
    """Further lines for the plan's list of assumptions."""

    def __post_init__(self) -> None:
        """Refuse what can be seen to be wrong without a model. Raises InputError."""
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, found {value}; leave it out to let the solver choose")
        if self.optimizer not in OPTIMIZER_STATES:
            raise InputError(f"optimizer {self.optimizer!r} is not known; use one of {', '.join(OPTIMIZER_STATES)}")
        for name, known in (("recompute", RECOMPUTE), ("data", DATA_MODES), ("schedule", SCHEDULES)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InputError(f"{name} {value!r} is not known; use one of {', '.join(known)}")
        if self.time_limit_s <= 0:
            raise InputError(f"time_limit_s must be above 0 seconds, found {self.time_limit_s}")
        if not 0 <= self.gap < 1:
            raise InputError(f"gap is a share of the step from 0 to below 1, found {self.gap}; 0.01 is one percent")
        for name in ("gradients", "reductions", "states", "master"):
            dtype = getattr(self.precision, name)
            if dtype is not None and dtype not in DTYPE_BYTES:
                raise InputError(f"dtype {dtype!r} of the {name} is not known; use one of {', '.join(DTYPE_BYTES)}")

    @property
    def optimizer_states(self) -> int:
        """Optimizer tensors per parameter."""
        return OPTIMIZER_STATES[self.optimizer]

    @property
    def pins_tensor(self) -> bool:
        """Whether the tensor degree is pinned, by itself or by what the other two leave."""
        return self.tp is not None or (self.pp is not None and self.dp is not None)

    @property
    def pinned(self) -> tuple[tuple[str, str], ...]:
        """What is pinned, for messages and the plan."""
        names = ("pp", "dp", "cp", "tp", "ep", "microbatch", "recompute", "data", "shards", "schedule", "chunks")
        found = [(name, str(getattr(self, name))) for name in names if getattr(self, name) is not None]
        if self.cuts is not None:
            found.append(("cuts", ",".join(map(str, self.cuts))))
        for name in ("pins", "forbid", "keep"):
            found += [(name.removesuffix("s"), text) for text in getattr(self, name)]
        return tuple(found)
