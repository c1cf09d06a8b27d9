"""Peak bytes of one device, by cause: the one memory formula, used by the solver and by reports.

A stage keeps its parameters, gradients and optimizer states, the activations of every microbatch in flight, and what
the segment that is running needs on top. The last part is the maximum over segments of the sum of its causes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autoplan.ir import TensorMeta
from autoplan.plan.data_axis import data_placement
from autoplan.plan.plan import Amounts, DataMode
from autoplan.sharding import REPLICATE, Placement, Shard, local_shape

CAUSES = (
    "parameters", "gradients", "optimizer states", "activations", "transient", "gathered parameters",
    "communication buffers",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamBytes:
    """A set of parameters on one device; each figure for all of them and for the trainable ones."""

    whole: int = 0
    trainable: int = 0
    """After the tensor and expert splits: what is computed with."""
    kept: int = 0
    kept_trainable: int = 0
    """The part that a rank owns when data ranks share them."""
    gathered: int = 0
    gathered_trainable: int = 0
    """The part of ``whole`` that mode "shard" gathers around each use."""

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
    """How data ranks hold parameters, how many microbatches add up to a step, and bytes beside the parameters'."""

    mode: DataMode
    ranks: int
    """Data ranks: dp x cp."""
    num_microbatches: int
    gradients: tuple[int, int] = (1, 1)
    """Bytes of a gradient per byte of its parameter, as a fraction."""
    states: tuple[int, int] = (2, 1)
    """Bytes of optimizer states (and a master copy) per byte of the parameter; none when they are offloaded."""

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered around each use."""
        return self.mode == "shard" and self.ranks > 1

    def gradient_bytes(self, param_bytes: int) -> int:
        """Bytes of the gradients of parameters of that size."""
        return -(-param_bytes * self.gradients[0] // self.gradients[1])

    def state_bytes(self, param_bytes: int) -> int:
        """Bytes of their optimizer states."""
        return -(-param_bytes * self.states[0] // self.states[1])


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


@lru_cache(maxsize=65_536)
def param_bytes(
    meta: TensorMeta, trainable: bool, tensor: Placement, tp: int, *, expert: int = 1, mode: DataMode, shards: int
) -> ParamBytes:
    """Bytes of one parameter, split over tp, then over ``expert`` (dim 0), then shared by ``shards`` data ranks.

    In mode "shard" ``data_placement`` says which dim is split, if any; "zero1" and "zero2" share flat ranges.
    """
    local = replace(meta, shape=local_shape(meta.shape, tensor, tp, 0))
    if expert > 1:
        local = replace(local, shape=local_shape(local.shape, Shard(0), expert, 0))
    split = local.shape if expert > 1 else meta.shape
    data = data_placement(split, tensor, shards) if mode == "shard" else REPLICATE
    kept = replace(local, shape=local_shape(local.shape, data, shards, 0)).num_bytes
    if mode in ("zero1", "zero2"):
        kept = -(-local.num_bytes // shards)
    gathered = local.num_bytes if isinstance(data, Shard) else 0
    return ParamBytes(
        whole=local.num_bytes,
        trainable=local.num_bytes * trainable,
        kept=kept,
        kept_trainable=kept * trainable,
        gathered=gathered,
        gathered_trainable=gathered * trainable,
    )


def state_causes(params: ParamBytes, data: DataAxis) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer states.

    Gradients of mode "shard" are reduced once a step: with several microbatches they add up whole until then. Those of
    "zero2" are reduced after each microbatch.
    """
    whole = data.gradient_bytes(params.trainable)
    match data.mode:
        case "replicate":
            return params.whole, whole, data.state_bytes(params.trainable)
        case "zero1":
            return params.whole, whole, data.state_bytes(params.kept_trainable)
        case "zero2":
            kept = data.gradient_bytes(params.kept_trainable)
            return params.whole, kept, data.state_bytes(params.kept_trainable)
        case "shard":
            kept = data.gradient_bytes(params.kept_trainable)
            gradients = kept if data.num_microbatches == 1 else whole
            return params.kept, gradients, data.state_bytes(params.kept_trainable)


def running_causes(segment: SegmentMemory, data: DataAxis) -> tuple[int, int, int]:
    """Transient bytes, gathered parameters and communication buffers while one segment runs.

    A sharded segment is gathered whole, with the next one on its way, and its gradients are one buffer; whole
    gradients are summed from one flat buffer.
    """
    if data.ranks == 1:
        return segment.transient_bytes, 0, segment.buffer_bytes
    gradients = data.gradient_bytes(segment.params.trainable)
    if not data.gathers:
        return segment.transient_bytes, 0, segment.buffer_bytes + gradients
    gathered = segment.gathered_bytes
    return segment.transient_bytes, gathered, segment.buffer_bytes + gathered + gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkMemory:
    """A stage among the chunks of its rank."""

    segments: tuple[SegmentMemory, ...]
    held_bytes: int
    """Parameters that several segments of the stage read: in mode "shard" they stay gathered while it runs."""


def rank_memory(
    chunks: Sequence[ChunkMemory], data: DataAxis, in_flight: Sequence[Sequence[int]], prelude_bytes: int
) -> Amounts:
    """Peak bytes of a rank, by cause.

    ``in_flight`` has the numbers of microbatches whose activations each chunk holds, at every moment that may be the
    fullest. ``prelude_bytes`` counts per microbatch in flight, as activations do.
    """
    segments = [segment for chunk in chunks for segment in chunk.segments]
    states = [state_causes(segment.params, data) for segment in segments]
    kept = [sum(segment.activation_bytes for segment in chunk.segments) + prelude_bytes for chunk in chunks]
    activations = max(sum(n * size for n, size in zip(counts, kept, strict=True)) for counts in in_flight)
    transient, gathered, buffers = max((running_causes(segment, data) for segment in segments), key=sum)
    gathered += sum(chunk.held_bytes for chunk in chunks) if data.gathers else 0
    amounts = (*(sum(part) for part in zip(*states, strict=True)), activations, transient, gathered, buffers)
    return Amounts(by_cause=tuple(zip(CAUSES, map(float, amounts), strict=True)))
