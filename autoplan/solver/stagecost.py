"""What a segment, and a stage of segments, costs at one point of level 0: the terms of the step time.

A segment's ``end`` terms are paid once a step, the others once a microbatch. Sharded parameters are gathered before
each use, and gradients scattered after it, hidden only behind the segment's own compute; what comes after the last
backward pass is fully exposed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoplan.cluster import Group
from autoplan.cost import Work
from autoplan.ir import DTYPE_BYTES, SegmentedGraph
from autoplan.plan.memory import ChunkMemory, ParamBytes, SegmentMemory, param_bytes
from autoplan.sharding import REPLICATE_PARTIAL_GRAD, CollectiveKind, Placement
from autoplan.solver.dataranks import Issued, When, data_collectives, gathered, sharing, time_us
from autoplan.solver.setting import Setting
from autoplan.solver.tables import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCost:
    """The terms of one segment on its stage."""

    forward_us: float
    backward_us: float
    weight_us: float
    """The part of ``backward_us`` for gradients of parameters."""
    forward_comm_us: float
    backward_comm_us: float
    """On the tensor, context and expert axes."""
    forward_data_us: float
    """Exposed part of gathering parameters."""
    backward_data_us: float
    """Exposed part of gathering parameters and scattering gradients with each microbatch."""
    tensor_end_us: float
    data_end_us: float
    optimizer_us: float
    tensor_sum_bytes: int
    """Gradients summed over the tensor axis once a step."""
    dispatch: tuple[Issued, ...]
    """Tokens that travel to their experts and back."""
    data: tuple[Issued, ...]
    """What it issues over the data ranks."""
    memory: SegmentMemory

    @property
    def time_us(self) -> float:
        """One microbatch."""
        return self.compute_us + self.comm_us + self.data_us

    @property
    def comm_us(self) -> float:
        """Exposed communication of one microbatch on the model's axes."""
        return self.forward_comm_us + self.backward_comm_us

    @property
    def data_us(self) -> float:
        """Exposed communication of one microbatch over the data ranks."""
        return self.forward_data_us + self.backward_data_us

    @property
    def compute_us(self) -> float:
        """One microbatch, compute alone."""
        return self.forward_us + self.backward_us

    @property
    def end_us(self) -> float:
        """Once a step."""
        return self.tensor_end_us + self.data_end_us + self.optimizer_us


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamCost:
    """What the parameters of a segment cost by one layout: the same for every way to recompute."""

    params: ParamBytes
    gathered_bytes: int
    data: tuple[Issued, ...]
    forward_us: float
    """Collectives over the data ranks in one forward pass, before anything hides them."""
    backward_us: float
    accumulate_us: float
    """Adding the gradients of a microbatch to those of the ones before."""
    last_us: float
    """With the last backward pass of a step."""
    end_us: float
    tensor_sum_bytes: int
    tensor_end_us: float
    optimizer_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What the parameters of a segment measure by one layout and one way to share them, whoever the ranks are."""

    params: tuple[ParamBytes, ParamBytes]
    """All but experts that are split, and those."""
    alone: tuple[ParamBytes, ParamBytes]
    """Of these, what is gathered around this segment alone."""
    tensor_sum_bytes: int


def held_bytes(setting: Setting, option: Option, owned: Iterable[str], shared: Iterable[str] = ()) -> HeldBytes:
    """Measure the parameters of a segment; ``owned`` and ``shared`` as in ``segment_cost``."""
    names, held = tuple(owned), frozenset(shared)
    apart = option.experts if setting.point.expert > 1 else frozenset()
    params, alone = [], []
    for is_expert in (False, True):
        each = {name: param_of(setting, option, name) for name in names if (name in apart) is is_expert}
        params.append(sum(each.values(), ParamBytes()))
        alone.append(sum((size for name, size in each.items() if name not in held), ParamBytes()))
    return HeldBytes(
        params=(params[0], params[1]),
        alone=(alone[0], alone[1]),
        tensor_sum_bytes=sum(_tensor_sum_bytes(setting, option, name) for name in names),
    )


def param_cost(setting: Setting, held: HeldBytes) -> ParamCost:
    """Price the parameters of a segment."""
    issued = tuple(
        one
        for is_expert in (False, True)
        for one in data_collectives(setting, held.params[is_expert], held.alone[is_expert], sharing(setting, is_expert))
    )
    params = held.params[0] + held.params[1]
    return ParamCost(
        params=params,
        gathered_bytes=held.alone[0].gathered + held.alone[1].gathered,
        data=issued,
        forward_us=time_us(setting, issued, "forward"),
        backward_us=time_us(setting, issued, "backward"),
        accumulate_us=accumulate_us(setting, params),
        last_us=time_us(setting, issued, "last backward"),
        end_us=time_us(setting, issued, "end"),
        tensor_sum_bytes=held.tensor_sum_bytes,
        tensor_end_us=setting.collective_us(CollectiveKind.ALL_REDUCE, held.tensor_sum_bytes, setting.groups.tensor),
        optimizer_us=optimizer_us(setting, params),
    )


def segment_cost(setting: Setting, option: Option, owned: Iterable[str], shared: Iterable[str] = ()) -> SegmentCost:
    """Price a segment.

    ``owned`` are those of its parameters, named as in the first segment of its class, that no earlier segment of the
    stage reads; ``shared`` are those of them that a later one reads, so that the stage gathers them.
    """
    return with_params(setting, option, param_cost(setting, held_bytes(setting, option, owned, shared)))


def with_params(setting: Setting, option: Option, held: ParamCost) -> SegmentCost:
    """Price a segment whose parameters are priced."""
    cost = option.cost
    dispatch = _dispatch(setting, option)
    return SegmentCost(
        forward_us=cost.forward_us,
        backward_us=cost.backward_us + held.accumulate_us,
        weight_us=cost.weight_us + held.accumulate_us,
        forward_comm_us=cost.forward_comm_us + time_us(setting, dispatch, "forward"),
        backward_comm_us=cost.backward_comm_us + time_us(setting, dispatch, "backward"),
        forward_data_us=exposed_us(setting, held.forward_us, cost.forward_us),
        backward_data_us=exposed_us(setting, held.backward_us, cost.backward_us),
        tensor_end_us=held.tensor_end_us,
        data_end_us=held.end_us + exposed_us(setting, held.last_us, cost.backward_us),
        optimizer_us=held.optimizer_us,
        tensor_sum_bytes=held.tensor_sum_bytes,
        dispatch=dispatch,
        data=held.data,
        memory=SegmentMemory(
            params=held.params,
            gathered_bytes=held.gathered_bytes,
            activation_bytes=cost.activation_bytes,
            transient_bytes=cost.transient_bytes,
            buffer_bytes=max(option.buffer_bytes, option.dispatch_bytes if setting.point.expert > 1 else 0),
        ),
    )


def _dispatch(setting: Setting, option: Option) -> tuple[Issued, ...]:
    """Tokens go to their experts and their results come back, and gradients likewise; recomputation repeats it."""
    if setting.point.expert == 1 or not option.dispatch_bytes:
        return ()

    def exchange(when: When) -> Issued:
        return Issued(
            axis="ep",
            kind=CollectiveKind.ALL_TO_ALL,
            num_bytes=option.dispatch_bytes,
            group=setting.groups.expert,
            when=when,
        )

    repeated = 2 if option.recompute == "full" else 0
    return (exchange("forward"),) * 2 + (exchange("backward"),) * (2 + repeated)


def param_of(setting: Setting, option: Option, name: str) -> ParamBytes:
    """Bytes of one of the segment's parameters."""
    point = setting.point
    is_expert = name in option.experts
    return param_bytes(
        setting.sg.graph.metas[name],
        setting.trainable[name],
        option.resolved.sources[name],
        point.tp,
        expert=point.expert if is_expert else 1,
        mode=point.data,
        shards=point.expert_shards if is_expert else point.shards,
    )


def _tensor_sum_bytes(setting: Setting, option: Option, name: str) -> int:
    """A gradient that is a sum over the tensor axis is summed as the optimizer holds it."""
    place: Placement = option.resolved.sources[name]
    if setting.point.tp == 1 or place != REPLICATE_PARTIAL_GRAD:
        return 0
    return setting.sum_bytes(updated_bytes(setting, param_of(setting, option, name)))


def updated_bytes(setting: Setting, params: ParamBytes) -> int:
    """Bytes of the trainable parameters that one rank updates."""
    return params.trainable if setting.point.data == "replicate" else params.kept_trainable


def exposed_us(setting: Setting, comm_us: float, compute_us: float) -> float:
    """What communication beside compute adds to it: all that outlasts it, and what the hidden part takes from it."""
    hidden = min(comm_us, compute_us)
    return comm_us - hidden + setting.cost.overlap_loss() * hidden


def accumulate_us(setting: Setting, params: ParamBytes) -> float:
    """Per microbatch: read the new gradient and the sum so far, write the sum."""
    if setting.point.num_microbatches == 1 or params.trainable == 0:
        return 0.0
    dtype = next(iter(setting.sg.graph.params)).meta.dtype
    gradients = setting.data_axis.gradient_bytes(params.trainable)
    flops = params.trainable // DTYPE_BYTES[dtype]
    work = Work(kind="memory", flops=flops, num_bytes=params.trainable + 2 * gradients, dtype=dtype)
    return setting.cost.compute_us(work)


def optimizer_us(setting: Setting, params: ParamBytes) -> float:
    """Update of the trainable parameters: read gradient, parameter and states, write parameter and states.

    With states in host memory the gradient goes there and the parameter comes back over the device's host link, and
    the update itself, on the host, is charged at the speed of that link.
    """
    updated = updated_bytes(setting, params)
    if updated == 0:
        return 0.0
    traffic = -(-updated * setting.state_traffic[0] // setting.state_traffic[1])
    if setting.point.offload:
        return setting.cost.host_copy_us(2 * updated + traffic)
    dtype = next(iter(setting.sg.graph.params)).meta.dtype
    flops = 4 * updated // DTYPE_BYTES[dtype]
    return setting.cost.compute_us(Work(kind="memory", flops=flops, num_bytes=traffic, dtype=dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """A stage: its segments, and what it sends."""

    start: int
    end: int
    options: tuple[Option, ...]
    owned: tuple[tuple[str, ...], ...]
    """Per segment: the parameters it owns, by their own names."""
    segments: tuple[SegmentCost, ...]
    held: tuple[Issued, ...]
    """Gathers and scatters of parameters that several segments read: once for the whole stage, fully exposed."""
    held_us: tuple[float, float, float]
    """Their time in forward, in backward and once a step."""
    send_us: tuple[float, float]
    """To the next stage in forward, to the one before in backward, one microbatch."""
    tied_us: float
    """Summing the gradients of parameters that other stages hold too, once a step."""
    memory: ChunkMemory

    @property
    def forward_us(self) -> float:
        """One microbatch."""
        inside = sum(s.forward_us + s.forward_comm_us + s.forward_data_us for s in self.segments)
        return inside + self.held_us[0] + self.send_us[0]

    @property
    def backward_us(self) -> float:
        """One microbatch, gradients of parameters included."""
        inside = sum(s.backward_us + s.backward_comm_us + s.backward_data_us for s in self.segments)
        return inside + self.held_us[1] + self.send_us[1]

    @property
    def weight_us(self) -> float:
        """The part of ``backward_us`` for gradients of parameters."""
        return sum(segment.weight_us for segment in self.segments)

    @property
    def time_us(self) -> float:
        """One microbatch."""
        return self.forward_us + self.backward_us

    @property
    def end_us(self) -> float:
        """Once a step."""
        return sum(segment.end_us for segment in self.segments) + self.tied_us + self.held_us[2]


def owned_params(sg: SegmentedGraph, start: int, end: int) -> tuple[tuple[str, ...], ...]:
    """Per segment of a stage: the parameters that no earlier segment of the stage reads."""
    seen: set[str] = set()
    owned = []
    for segment in sg.segments[start:end]:
        owned.append(tuple(name for name in segment.params if name not in seen))
        seen.update(segment.params)
    return tuple(owned)


def holders(sg: SegmentedGraph, edges: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Parameter value to the stages that hold it."""
    found: dict[str, list[int]] = {}
    for stage, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        for name in dict.fromkeys(name for segment in sg.segments[start:end] for name in segment.params):
            found.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in found.items()}


def in_class(sg: SegmentedGraph, index: int, names: Iterable[str]) -> tuple[str, ...]:
    """Parameters of a segment under the names they have in the first segment of its class."""
    segment = sg.segments[index]
    first = dict(zip(segment.params, sg.representative(segment.kind).params, strict=True))
    return tuple(first[name] for name in names)


def stage_cost(setting: Setting, options: tuple[Option, ...], stage: int, edges: Sequence[int]) -> StageCost:
    """Price segments ``edges[stage]`` to ``edges[stage + 1]``, run by ``options``."""
    start, end = edges[stage], edges[stage + 1]
    owned = owned_params(setting.sg, start, end)
    reads = Counter(name for segment in setting.sg.segments[start:end] for name in segment.params)
    shared = tuple(tuple(name for name in names if reads[name] > 1) for names in owned)
    segments = tuple(
        segment_cost(
            setting, option, in_class(setting.sg, start + i, names), in_class(setting.sg, start + i, shared[i])
        )
        for i, (option, names) in enumerate(zip(options, owned, strict=True))
    )
    stage_held = sum(
        (
            param_of(setting, options[i], name)
            for i, names in enumerate(shared)
            for name in in_class(setting.sg, start + i, names)
        ),
        ParamBytes(),
    )
    held = held_collectives(setting, stage_held)
    count = len(setting.sg.segments)
    return StageCost(
        start=start,
        end=end,
        options=options,
        owned=owned,
        segments=segments,
        held=held,
        held_us=(
            time_us(setting, held, "forward"),
            time_us(setting, held, "backward"),
            time_us(setting, held, "last backward"),
        ),
        send_us=(
            setting.send_us(end) if end < count else 0.0,
            setting.send_us(start) if start > 0 else 0.0,
        ),
        tied_us=_stage_tied_us(setting, options, owned, start, edges),
        memory=ChunkMemory(segments=tuple(segment.memory for segment in segments), held_bytes=stage_held.gathered),
    )


def held_collectives(setting: Setting, params: ParamBytes) -> tuple[Issued, ...]:
    """What mode "shard" does for parameters that several segments of a stage read."""
    if setting.point.data != "shard" or setting.groups.shard.size == 1:
        return ()
    return tuple(issued for issued in gathered(setting, params, sharing(setting, False)) if issued.num_bytes)


def _stage_tied_us(
    setting: Setting,
    options: tuple[Option, ...],
    owned: tuple[tuple[str, ...], ...],
    start: int,
    edges: Sequence[int],
) -> float:
    held = holders(setting.sg, edges)
    tied = [
        (param_of(setting, options[i], *in_class(setting.sg, start + i, (name,))), len(held[name]))
        for i, names in enumerate(owned)
        for name in names
        if len(held[name]) > 1
    ]
    return sum(tied_us(setting, params, count) for params, count in tied)


def tied_us(setting: Setting, params: ParamBytes, num_holders: int) -> float:
    """Time of summing the gradient of a tied parameter over the stages that hold it."""
    per_node = min(num_holders, setting.groups.pipeline.per_node)
    group = Group(size=num_holders, per_node=per_node)
    return setting.collective_us(CollectiveKind.ALL_REDUCE, setting.sum_bytes(updated_bytes(setting, params)), group)
