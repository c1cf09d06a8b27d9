"""Peak bytes of one device, by cause: the one memory formula, used by the solver and by reports.

A stage keeps its parameters, gradients and optimizer states, the activations of every microbatch in flight, and what
the segment that is running needs on top. The last part is the maximum over segments of the sum of its causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoplan.ir import TensorMeta
from autoplan.plan.data_axis import data_placement
from autoplan.plan.plan import Amounts, DataMode
from autoplan.sharding import Placement, Shard, local_shape

CAUSES = (
    "parameters", "gradients", "optimizer states", "activations", "transient", "gathered parameters",
    "communication buffers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamBytes:
    """A set of parameters on one device, in both data modes; each figure for all of them and for the trainable ones."""

    whole: int = 0
    trainable: int = 0
    """After the tensor split: what is computed with."""
    kept: int = 0
    kept_trainable: int = 0
    """What a rank keeps in mode "shard"."""
    gathered: int = 0
    gathered_trainable: int = 0
    """The part of ``whole`` that the data axis splits in mode "shard" and gathers around each use."""

    def __add__(self, other: "ParamBytes") -> "ParamBytes":
        """Field by field."""
        return ParamBytes(
            whole=self.whole + other.whole,
            trainable=self.trainable + other.trainable,
            kept=self.kept + other.kept,
            kept_trainable=self.kept_trainable + other.kept_trainable,
            gathered=self.gathered + other.gathered,
            gathered_trainable=self.gathered_trainable + other.gathered_trainable,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAxis:
    """How parameters lie on the data axis, and how many microbatches add up to a step."""

    mode: DataMode
    degree: int
    num_microbatches: int

    @property
    def is_sharded(self) -> bool:
        """Whether the data axis splits parameters at all."""
        return self.mode == "shard" and self.degree > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentMemory:
    """What a segment adds to its stage."""

    params: ParamBytes
    """Parameters that it owns: none that an earlier segment of the stage reads too."""
    gathered_bytes: int
    """Of these, what mode "shard" gathers around this segment alone."""
    activation_bytes: int
    """Per microbatch."""
    transient_bytes: int
    buffer_bytes: int
    """Largest buffer of a tensor-parallel collective."""


def param_bytes(meta: TensorMeta, trainable: bool, tensor: Placement, tp: int, dp: int) -> ParamBytes:
    """Bytes of one parameter. In mode "shard" ``data_placement`` says which dim the data axis splits, if any."""
    local = replace(meta, shape=local_shape(meta.shape, tensor, tp, 0))
    data = data_placement(meta.shape, tensor, dp)
    kept = replace(local, shape=local_shape(local.shape, data, dp, 0)).num_bytes
    gathered = local.num_bytes if isinstance(data, Shard) else 0
    return ParamBytes(
        whole=local.num_bytes,
        trainable=local.num_bytes * trainable,
        kept=kept,
        kept_trainable=kept * trainable,
        gathered=gathered,
        gathered_trainable=gathered * trainable,
    )


def state_causes(params: ParamBytes, data: DataAxis, optimizer_states: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states.

    Sharded gradients are reduced once a step: with several microbatches they add up whole until then.
    """
    if not data.is_sharded:
        return params.whole, params.trainable, optimizer_states * params.trainable
    gradients = params.kept_trainable if data.num_microbatches == 1 else params.trainable
    return params.kept, gradients, optimizer_states * params.kept_trainable


def running_causes(segment: SegmentMemory, data: DataAxis) -> tuple[int, int, int]:
    """Transient bytes, gathered parameters and communication buffers while one segment runs.

    A sharded segment is gathered whole, with the next one on its way, and its gradients are one buffer; whole
    gradients are summed from one flat buffer.
    """
    if data.degree == 1:
        return segment.transient_bytes, 0, segment.buffer_bytes
    if not data.is_sharded:
        return segment.transient_bytes, 0, segment.buffer_bytes + segment.params.trainable
    gathered = segment.gathered_bytes
    return segment.transient_bytes, gathered, segment.buffer_bytes + gathered + segment.params.trainable


def stage_memory(
    segments: Sequence[SegmentMemory],
    data: DataAxis,
    *,
    in_flight: int,
    optimizer_states: int,
    prelude_bytes: int,
    held_bytes: int,
) -> Amounts:
    """Peak bytes of a stage, by cause.

    ``prelude_bytes`` counts per microbatch in flight, as activations do. ``held_bytes`` are parameters that several
    segments of the stage read: in mode "shard" they are gathered as long as the stage runs.
    """
    states = [state_causes(segment.params, data, optimizer_states) for segment in segments]
    activations = in_flight * (sum(segment.activation_bytes for segment in segments) + prelude_bytes)
    transient, gathered, buffers = max((running_causes(segment, data) for segment in segments), key=sum)
    gathered += held_bytes if data.is_sharded else 0
    amounts = (*(sum(part) for part in zip(*states, strict=True)), activations, transient, gathered, buffers)
    return Amounts(by_cause=tuple(zip(CAUSES, map(float, amounts), strict=True)))
