"""Peak bytes of one device, by cause: the one memory formula, used by the solver and by reports.

A stage keeps its parameters, gradients and optimizer states, the activations of every microbatch in flight, and what
the segment that is running needs on top. The last part is the maximum over segments of the sum of its causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.ir import TensorMeta
from autoplan.plan.plan import Amounts, DataMode
from autoplan.sharding import Placement, local_shape

CAUSES = (
    "parameters", "gradients", "optimizer states", "activations", "transient", "gathered parameters",
    "communication buffers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamBytes:
    """A set of parameters on one device: after the tensor split (``whole``), and after the data split too."""

    whole: int = 0
    sharded: int = 0
    trainable_whole: int = 0
    trainable_sharded: int = 0

    def __add__(self, other: "ParamBytes") -> "ParamBytes":
        """Field by field."""
        return ParamBytes(
            whole=self.whole + other.whole,
            sharded=self.sharded + other.sharded,
            trainable_whole=self.trainable_whole + other.trainable_whole,
            trainable_sharded=self.trainable_sharded + other.trainable_sharded,
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
    activation_bytes: int
    """Per microbatch."""
    transient_bytes: int
    buffer_bytes: int
    """Largest buffer of a tensor-parallel collective."""


def param_bytes(meta: TensorMeta, trainable: bool, tensor: Placement, tp: int, dp: int) -> ParamBytes:
    """Bytes of one parameter. The data split cuts dim 0 as ``torch.chunk`` does, padded to equal parts."""
    local = TensorMeta(shape=local_shape(meta.shape, tensor, tp, 0), dtype=meta.dtype)
    rows = local.shape[0] if local.shape else 1
    sharded = local.num_bytes // rows * -(-rows // dp) if rows else 0
    return ParamBytes(
        whole=local.num_bytes,
        sharded=sharded,
        trainable_whole=local.num_bytes * trainable,
        trainable_sharded=sharded * trainable,
    )


def state_causes(params: ParamBytes, data: DataAxis, optimizer_states: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states.

    Sharded gradients are reduced once a step: with several microbatches they add up whole until then.
    """
    if not data.is_sharded:
        return params.whole, params.trainable_whole, optimizer_states * params.trainable_whole
    gradients = params.trainable_sharded if data.num_microbatches == 1 else params.trainable_whole
    return params.sharded, gradients, optimizer_states * params.trainable_sharded


def running_causes(segment: SegmentMemory, data: DataAxis) -> tuple[int, int, int]:
    """Transient bytes, gathered parameters and communication buffers while one segment runs.

    A sharded segment is gathered whole, with the next one on its way, and its gradients are one buffer; replicated
    gradients are summed from one flat buffer.
    """
    if data.degree == 1:
        return segment.transient_bytes, 0, segment.buffer_bytes
    if data.mode == "replicate":
        return segment.transient_bytes, 0, segment.buffer_bytes + segment.params.trainable_whole
    buffers = segment.buffer_bytes + segment.params.whole + segment.params.trainable_whole
    return segment.transient_bytes, segment.params.whole, buffers


def stage_memory(
    segments: Sequence[SegmentMemory], data: DataAxis, *, in_flight: int, optimizer_states: int, prelude_bytes: int
) -> Amounts:
    """Peak bytes of a stage, by cause. ``prelude_bytes`` counts per microbatch in flight, as activations do."""
    states = [state_causes(segment.params, data, optimizer_states) for segment in segments]
    activations = in_flight * (sum(segment.activation_bytes for segment in segments) + prelude_bytes)
    running = max((running_causes(segment, data) for segment in segments), key=sum)
    amounts = (*(sum(part) for part in zip(*states, strict=True)), activations, *running)
    return Amounts(by_cause=tuple(zip(CAUSES, map(float, amounts), strict=True)))
