"""The answer, as data. A Plan and the traced Graph are all that a run or a report needs.

Mesh axes are ``pp`` (pipeline), ``dp`` (data), ``cp`` (context) and ``tp`` (tensor), outermost first, in the order that
suits the network. Three of them carry placements:

    batch    the samples, split over dp ranks and, in time, over microbatches: part ``dp_rank * m + microbatch``
             of ``dp * m`` equal parts. Parameters are ``Replicate(partial_grad)`` here.
    context  the cp axis: positions of the sequence. Parameters are ``Replicate(partial_grad)`` here too, so that
             dp x cp ranks, the *data ranks*, hold the same parameters and may share their states.
    tensor   the tp axis.

Experts are split over ``expert`` of the data ranks; tokens travel between these.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autoplan.cluster import Cluster, Mesh
from autoplan.sharding import REPLICATE, CollectiveKind, Placement, Strategy

SCHEMA_VERSION = 2

Recompute = Literal["none", "gather", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "gather", "selective", "full")
DataMode = Literal["replicate", "zero1", "zero2", "shard"]
DATA_MODES: tuple[DataMode, ...] = ("replicate", "zero1", "zero2", "shard")
"""What data ranks share: nothing, optimizer states, gradients too, parameters too (FSDP2, ZeRO-3)."""
ScheduleKind = Literal["1f1b", "interleaved", "zero-bubble", "zbv"]
SCHEDULES: tuple[ScheduleKind, ...] = ("1f1b", "interleaved", "zero-bubble", "zbv")
MESH_AXES = ("pp", "dp", "cp", "tp")
SearchStatus = Literal["complete", "time limit", "interrupted", "priced"]
SEARCH_STATUS: tuple[SearchStatus, ...] = ("complete", "time limit", "interrupted", "priced")
"""How the search ended; "priced": there was none, a given plan was priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """How one op runs: its strategy on the batch axis and on the tensor axis."""

    node: str
    """Name of the node in the first segment of the class."""
    batch: Strategy
    tensor: Strategy
    context: Strategy | None = None
    """None where cp is 1: the op runs whole there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """``count`` collectives of one kind along one axis.

    Axes are ``tp``, ``cp``, ``pp``, ``dp`` (the data ranks that share one copy of the parameters), ``replicas`` (the
    copies), ``ep`` and ``experts`` (the same for experts) and ``tied`` (stages that hold the same parameter).

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
    """Forward, backward and recomputation together, on the tensor, context and expert axes."""
    weight_us: float = 0.0
    """The part of ``backward_us`` that computes gradients of parameters: what a zero-bubble schedule defers."""


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
    expert: Placement = REPLICATE
    """``Shard(0)`` for experts that are split over data ranks; the rest of these ranks then share the states."""


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
    """Peak bytes of a device that runs this stage, by cause, all its chunks together."""
    collectives: tuple[CollectiveCount, ...]
    """All that one rank issues in one training step for this stage."""
    weight_us: float = 0.0
    """The part of ``backward_us`` that a zero-bubble schedule defers."""
    rank: int = 0
    """Its place on the pp axis."""


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
class Proof:
    """How good the plan is by the cost model, and what the search did to know it."""

    status: SearchStatus
    bound_us: float
    """No plan in the space that was searched has a shorter step."""
    bound_by: str
    """Where that bound comes from, in words."""
    num_solved: int
    """Candidates whose stages were solved."""
    num_bounded: int
    """Candidates left out because their lower bound is no better."""
    num_refused: int
    """Candidates that cannot be, by memory or otherwise."""
    refusals: tuple[tuple[str, int], ...] = ()
    """Reasons in words, with the number of candidates each refused; most frequent first."""

    def gap(self, step_us: float) -> float:
        """Share of the step by which the optimum may be better: 0.01 is 1 %."""
        return max(0.0, 1 - self.bound_us / step_us) if step_us > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A good plan of the search, the chosen one among them, in figures."""

    label: str
    step: Amounts
    peak_bytes: int
    """Of the fullest device."""
    on_front: bool
    """No other plan that was solved is both faster and smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Dtypes of a training run beside that of the parameters; None: the parameter's own."""

    gradients: str | None = None
    reductions: str | None = None
    """In which gradients are summed over ranks."""
    states: str | None = None
    master: str | None = None
    """A copy of the parameters that the optimizer updates; None: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the model came from, so that other commands can trace it again."""

    model: str = ""
    """File or config as given to ``autoplan search``, absolute; empty when it came from Python."""
    cluster: str = ""
    seq_len: int | None = None
    dtype: str = ""
    options: tuple[tuple[str, str], ...] = ()
    """Flags of the search that shaped the space, as written."""


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
    schedule: ScheduleKind
    chunks: int = 1
    """Stages per rank of the pp axis."""
    num_microbatches: int
    data: DataMode
    """Which of parameters, gradients and optimizer states the data ranks split among them."""
    shards: int = 1
    """Data ranks over which they are split; the other data ranks hold copies (hybrid). 1 in mode "replicate"."""
    expert: int = 1
    """Data ranks over which experts are split."""
    offload: bool = False
    """Whether optimizer states live in host memory."""
    precision: Precision = Precision()
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
    proof: Proof
    choices: tuple[Choice, ...] = ()
    """The best plans found, fastest first, and those on the front of time against memory."""
    model_flops: int = 0
    """Of one step, forward and backward, nothing recomputed: what MFU counts. 0: unknown."""
    peak_flops_per_s: float = 0.0
    """Of one device for matrix work in the dtype; 0: unknown."""
    tokens: int = 0
    """Tokens in a step; 0 when samples have no sequence."""
    origin: Origin = Origin()
    assumptions: tuple[tuple[str, str], ...]
    """Everything the figures rest on: dtype, optimizer, sequence, what was pinned, solver status and gap."""

    def layout(self, name: str) -> Layout:
        """The layout of that name."""
        return next(layout for layout in self.layouts if layout.name == name)

    def param(self, name: str) -> ParamPlacement:
        """Where the parameter of that name lives."""
        return next(p for p in self.params if p.name == name)

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters before they are split among them."""
        return self.mesh.size("dp") * self.mesh.size("cp")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation (Chowdhery et al. 2022): model FLOPs over what the devices could do; 0: unknown."""
        could = self.peak_flops_per_s * self.mesh.num_devices * self.step.total / 1e6
        return self.model_flops / could if could else 0.0

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
