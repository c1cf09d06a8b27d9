"""The answer, as data. A Plan and the traced Graph are all that a run or a report needs.

Mesh axes are always ``pp`` (pipeline), ``dp`` (data) and ``tp`` (tensor), outermost first. Two axes carry placements:

    batch   the samples, split over dp ranks and, in time, over microbatches: part ``dp_rank * m + microbatch``
            of ``dp * m`` equal parts. Parameters are ``Replicate(partial_grad)`` here.
    tensor  the tp axis.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autoplan.cluster import Cluster, Mesh
from autoplan.sharding import REPLICATE, CollectiveKind, Placement, Strategy

SCHEMA_VERSION = 1

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
DataMode = Literal["replicate", "shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """How one op runs: its strategy on the batch axis and on the tensor axis."""

    node: str
    """Name of the node in the first segment of the class."""
    batch: Strategy
    tensor: Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """``count`` collectives of one kind along one axis (``tp``, ``dp``, ``pp``, or ``tied`` between stages).

    ``num_bytes`` is the sum over them, by the convention of ``cost.Collective``.
    """

    axis: str
    kind: CollectiveKind
    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutCost:
    """One segment, one microbatch, one device."""

    forward_us: float
    backward_us: float
    """Compute alone, recomputation included in backward."""
    forward_comm_us: float
    backward_comm_us: float
    activation_bytes: int
    """Kept from forward to backward."""
    transient_bytes: int
    """On top of it while the segment runs."""
    collectives: tuple[CollectiveCount, ...]
    """Forward, backward and recomputation together, tensor axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to run the segments of one class. ``inputs`` and ``outputs`` are placements on the tensor axis."""

    name: str
    kind: int
    recompute: Recompute
    ops: tuple[OpPlacement, ...]
    inputs: tuple[Placement, ...]
    """One per ``Segment.inputs``: how the value arrives."""
    outputs: tuple[Placement, ...]
    """One per ``Segment.outputs``: how it leaves."""
    cost: LayoutCost


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamPlacement:
    """Where one parameter lives: its placement on the tensor axis and on the data axis, by name in ``state_dict``.

    ``Replicate(partial_grad)`` on tp means that its gradient is summed over tp once a step. On dp it is ``Shard``
    (FSDP2 keeps a part) or ``Replicate`` (whole on each rank, gradient all-reduced); see ``plan/data_axis.py``.
    """

    name: str
    tensor: Placement
    data: Placement = REPLICATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """A total by cause: microseconds of a step or bytes of a device. Causes keep their order."""

    by_cause: tuple[tuple[str, float], ...]

    @property
    def total(self) -> float:
        """Sum over the causes."""
        return sum(value for _, value in self.by_cause)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Pairs of cause and amount."""
        return iter(self.by_cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Segments ``start`` to ``end`` (exclusive) of the chain on one slice of the pp axis."""

    start: int
    end: int
    layouts: tuple[str, ...]
    """Name of the layout of each segment."""
    forward_us: float
    """One microbatch, communication included."""
    backward_us: float
    memory: Amounts
    """Peak bytes per device, by cause."""
    collectives: tuple[CollectiveCount, ...]
    """All that one rank of this stage issues in one training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A candidate that lost."""

    label: str
    """``pp=2 dp=2 tp=2, 8 microbatches, recompute full``."""
    step_us: float | None
    """None when it was refused."""
    reason: str
    """What it lost by, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything needed to run and to explain."""

    schema_version: int = SCHEMA_VERSION
    version: str
    """Version of autoplan that wrote it."""
    model: str
    graph_digest: str
    batch_size: int
    """Global batch."""
    dtype: str
    """Dtype of the parameters: ``bfloat16``; several are joined by ``/``."""
    cluster: Cluster
    profile_digest: str
    mesh: Mesh
    schedule: Literal["1f1b"]
    num_microbatches: int
    data: DataMode
    """Whether parameters, gradients and optimizer states are split over dp (FSDP2) or whole on each rank."""
    kind_names: tuple[str, ...]
    segment_kinds: tuple[int, ...]
    """The chain: class of each segment."""
    segment_params: tuple[tuple[str, ...], ...]
    """Names of the parameters that each segment reads, in the order of ``Segment.params``."""
    prelude: tuple[tuple[str, Strategy], ...]
    """Strategy on the batch axis of each prelude op; on the tensor axis the prelude is replicated."""
    inputs: tuple[tuple[str, Placement], ...]
    """Placement on the batch axis of each user input value."""
    params: tuple[ParamPlacement, ...]
    layouts: tuple[Layout, ...]
    stages: tuple[Stage, ...]
    step: Amounts
    """Predicted microseconds of a training step by cause: compute, each communication, bubble, optimizer."""
    runners_up: tuple[RunnerUp, ...]
    assumptions: tuple[tuple[str, str], ...]
    """Everything the figures rest on: dtype, optimizer, sequence, what was pinned, solver status and gap."""

    def layout(self, name: str) -> Layout:
        """The layout of that name."""
        return next(layout for layout in self.layouts if layout.name == name)

    def param(self, name: str) -> ParamPlacement:
        """Where the parameter of that name lives."""
        return next(p for p in self.params if p.name == name)

    @property
    def parts(self) -> int:
        """Equal parts the batch is cut into, over dp ranks and microbatches."""
        return self.mesh.size("dp") * self.num_microbatches

    def save(self, path: str) -> None:
        """Write it as JSON. Raises OSError as ``open`` does; an older file survives a full disk."""
        from autoplan.plan.file import save_plan  # file.py needs this module's types

        save_plan(self, path)

    @staticmethod
    def load(path: str) -> "Plan":
        """Read it back and verify it. Raises PlanError naming the place and the fix."""
        from autoplan.plan.file import load_plan  # file.py needs this module's types

        return load_plan(path)

    def __str__(self) -> str:
        """The plan in words."""
        from autoplan.plan.text import plan_text  # text.py needs this module's types

        return plan_text(self)
