"""What the user asks for, beside the model and the cluster: pinned choices, optimizer, time."""

from dataclasses import dataclass
from typing import Literal

from autoplan.errors import InputError
from autoplan.plan.plan import RECOMPUTE, DataMode, Recompute

OptimizerName = Literal["adamw", "sgd"]
OPTIMIZER_STATES: dict[OptimizerName, int] = {"adamw": 2, "sgd": 0}
"""Tensors of the parameter's shape and dtype that the optimizer keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Limits and pinned choices of one search. ``None`` leaves a choice to the solver.

    Parameters, gradients and optimizer states all have the dtype of the parameter.
    """

    model: str
    """Name for people; it is written in the plan."""
    dtype: str
    optimizer: OptimizerName = "adamw"
    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    microbatch: int | None = None
    """Samples per microbatch and data-parallel rank."""
    recompute: Recompute | None = None
    data: DataMode | None = None
    time_limit_s: float = 60.0
    assumptions: tuple[tuple[str, str], ...] = ()
    """Further lines for the plan's list of assumptions."""

    def __post_init__(self) -> None:
        """Refuse what can be seen to be wrong without a model. Raises InputError."""
        for name, value in (("pp", self.pp), ("dp", self.dp), ("tp", self.tp), ("microbatch", self.microbatch)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, found {value}; leave it out to let the solver choose")
        if self.optimizer not in OPTIMIZER_STATES:
            raise InputError(f"optimizer {self.optimizer!r} is not known; use one of {', '.join(OPTIMIZER_STATES)}")
        if self.recompute is not None and self.recompute not in RECOMPUTE:
            raise InputError(f"recompute {self.recompute!r} is not known; use one of {', '.join(RECOMPUTE)}")
        if self.data not in (None, "replicate", "shard"):
            raise InputError(f"data mode {self.data!r} is not known; use replicate or shard")
        if self.time_limit_s <= 0:
            raise InputError(f"time_limit_s must be above 0 seconds, found {self.time_limit_s}")

    @property
    def optimizer_states(self) -> int:
        """Optimizer tensors per parameter."""
        return OPTIMIZER_STATES[self.optimizer]

    @property
    def pins_tensor(self) -> bool:
        """Whether the tensor degree is pinned, by itself or by what the other two leave."""
        return self.tp is not None or (self.pp is not None and self.dp is not None)

    @property
    def pins(self) -> tuple[tuple[str, str], ...]:
        """What is pinned, for messages and the plan."""
        pins: tuple[tuple[str, int | str | None], ...] = (
            ("pp", self.pp),
            ("dp", self.dp),
            ("tp", self.tp),
            ("microbatch", self.microbatch),
            ("recompute", self.recompute),
            ("data", self.data),
        )
        return tuple((name, str(value)) for name, value in pins if value is not None)
