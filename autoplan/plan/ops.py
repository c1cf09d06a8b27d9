"""The ops of a plan with their price opened, as data."""

from dataclasses import dataclass
from typing import Literal

from autoplan.cost import Estimate

Pass = Literal["forward", "again", "backward"]
"""``again`` is a forward pass that backward repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPrice:
    """One pass of one op, the same in every segment that runs it so."""

    op: str
    """As traced: ``aten.linear.default``; ``accumulate`` adds gradients up over microbatches."""
    where: str
    """Module and line of the first of them."""
    layers: str
    """The segments that run it, in words."""
    during: Pass
    shapes: str
    """What a device reads, local shapes."""
    flops: int
    num_bytes: int
    """Read and written."""
    estimate: Estimate
    """Of one microbatch."""
    count: int
    """Times in a step, over all stages of one pipeline: segments x microbatches."""

    @property
    def total_us(self) -> float:
        """In a step, over all stages of one pipeline."""
        return self.count * self.estimate.time_us
