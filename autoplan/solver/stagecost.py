"""What a segment, and a stage of segments, costs at one point of level 0: the terms of the step time.

A segment's ``end`` terms are paid once a step, the others once a microbatch. Sharded parameters are gathered before
each use, hidden only behind the segment's own compute; whole ones are summed fully exposed at the end of the step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoplan.cluster import Cluster, Group
from autoplan.cost import Collective, CostModel, Work
from autoplan.ir import SegmentedGraph, TensorMeta
from autoplan.plan.memory import ParamBytes, SegmentMemory, param_bytes, stage_memory
from autoplan.plan.plan import Amounts
from autoplan.sharding import REPLICATE_PARTIAL_GRAD, CollectiveKind, Placement
from autoplan.solver.mesh import Groups, Point
from autoplan.solver.tables import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Everything that is fixed while stages are priced at one point."""

    sg: SegmentedGraph
    cluster: Cluster
    cost: CostModel
    point: Point
    optimizer_states: int
    trainable: Mapping[str, bool]
    """Parameter value to whether it is trained."""
    prelude_bytes: int
    cut_bytes: tuple[tuple[int, ...], ...]
    """For each position in the chain: local bytes of the values that cross there."""
    sequence: bool

    @property
    def groups(self) -> Groups:
        """Groups of the mesh."""
        return self.point.groups(self.cluster)

    def collective_us(self, kind: CollectiveKind, num_bytes: int, group: Group) -> float:
        """Time of one collective; nothing for no bytes."""
        if num_bytes == 0:
            return 0.0
        return self.cost.collective_us(Collective(kind=kind, num_bytes=num_bytes, group=group))

    def send_us(self, position: int) -> float:
        """Time to send what crosses at a position of the chain."""
        return sum(
            self.collective_us(CollectiveKind.SEND, num_bytes, self.groups.neighbours)
            for num_bytes in self.cut_bytes[position]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentCost:
    """The terms of one segment on its stage."""

    forward_us: float
    backward_us: float
    forward_comm_us: float
    backward_comm_us: float
    forward_gather_us: float
    """Exposed part of gathering sharded parameters."""
    backward_gather_us: float
    tensor_end_us: float
    data_end_us: float
    optimizer_us: float
    tensor_sum_bytes: int
    """Gradients summed over the tensor axis once a step."""
    data_sum_bytes: int
    """Gradients all-reduced over the data axis once a step."""
    alone: ParamBytes
    """Parameters that no other segment of the stage reads: gathered and scattered around this one."""
    memory: SegmentMemory

    @property
    def time_us(self) -> float:
        """One microbatch."""
        return self.compute_us + self.forward_comm_us + self.backward_comm_us + self.gather_us

    @property
    def gather_us(self) -> float:
        """Exposed gathers of one microbatch."""
        return self.forward_gather_us + self.backward_gather_us

    @property
    def compute_us(self) -> float:
        """One microbatch, compute alone."""
        return self.forward_us + self.backward_us

    @property
    def end_us(self) -> float:
        """Once a step."""
        return self.tensor_end_us + self.data_end_us + self.optimizer_us


def segment_cost(setting: Setting, option: Option, owned: Iterable[str], shared: Iterable[str] = ()) -> SegmentCost:
    """Price a segment.

    ``owned`` are those of its parameters, named as in the first segment of its class, that no earlier segment of the
    stage reads; ``shared`` are those of them that a later one reads, so that the stage gathers them.
    """
    names, held = tuple(owned), frozenset(shared)
    each = {name: param_of(setting, option, name) for name in names}
    params = sum(each.values(), ParamBytes())
    alone = sum((size for name, size in each.items() if name not in held), ParamBytes())
    summed = sum(_tensor_sum_bytes(setting, option, name) for name in names)
    cost = option.cost
    gather = gather_us(setting, alone)
    data_sums = data_sum_bytes(setting, params)
    return SegmentCost(
        forward_us=cost.forward_us,
        backward_us=cost.backward_us,
        forward_comm_us=cost.forward_comm_us,
        backward_comm_us=cost.backward_comm_us,
        forward_gather_us=max(0.0, gather - cost.forward_us),
        backward_gather_us=max(0.0, gather - cost.backward_us),
        tensor_end_us=setting.collective_us(CollectiveKind.ALL_REDUCE, summed, setting.groups.tensor),
        data_end_us=setting.collective_us(CollectiveKind.ALL_REDUCE, data_sums, setting.groups.data)
        + max(0.0, scatter_us(setting, alone) - cost.backward_us),
        optimizer_us=optimizer_us(setting, params),
        tensor_sum_bytes=summed,
        data_sum_bytes=data_sums,
        alone=alone,
        memory=SegmentMemory(
            params=params,
            gathered_bytes=alone.gathered,
            activation_bytes=cost.activation_bytes,
            transient_bytes=cost.transient_bytes,
            buffer_bytes=option.buffer_bytes,
        ),
    )


def param_of(setting: Setting, option: Option, name: str) -> ParamBytes:
    """Bytes of one of the segment's parameters."""
    point = setting.point
    return param_bytes(
        setting.sg.graph.metas[name], setting.trainable[name], option.resolved.sources[name], point.tp, point.dp
    )


def _tensor_sum_bytes(setting: Setting, option: Option, name: str) -> int:
    place: Placement = option.resolved.sources[name]
    if setting.point.tp == 1 or place != REPLICATE_PARTIAL_GRAD:
        return 0
    return trained_bytes(setting, param_of(setting, option, name))


def trained_bytes(setting: Setting, params: ParamBytes) -> int:
    """Bytes of the trainable parameters that one rank updates."""
    return params.kept_trainable if setting.point.data_axis.is_sharded else params.trainable


def data_sum_bytes(setting: Setting, params: ParamBytes) -> int:
    """Gradients that are all-reduced over the data axis: all in mode "replicate", else those it cannot split."""
    if setting.point.dp == 1:
        return 0
    return params.trainable - (params.gathered_trainable if setting.point.data_axis.is_sharded else 0)


def gather_us(setting: Setting, params: ParamBytes) -> float:
    """Time to gather parameters once; 0 when the data axis does not split them."""
    num_bytes = params.gathered if setting.point.data_axis.is_sharded else 0
    return setting.collective_us(CollectiveKind.ALL_GATHER, num_bytes, setting.groups.data)


def scatter_us(setting: Setting, params: ParamBytes) -> float:
    """Time to reduce and scatter their gradients; 0 when the data axis does not split them."""
    num_bytes = params.gathered_trainable if setting.point.data_axis.is_sharded else 0
    return setting.collective_us(CollectiveKind.REDUCE_SCATTER, num_bytes, setting.groups.data)


def optimizer_us(setting: Setting, params: ParamBytes) -> float:
    """Update of the trainable parameters: read gradient, parameter and states, write parameter and states."""
    trained = trained_bytes(setting, params)
    if trained == 0:
        return 0.0
    traffic = trained * (3 + 2 * setting.optimizer_states)
    dtype = next(iter(setting.sg.graph.params)).meta.dtype
    flops = 4 * trained // TensorMeta(shape=(1,), dtype=dtype).num_bytes
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
    held: ParamBytes
    """Parameters that several segments read: gathered once for the whole stage."""
    held_gather_us: float
    """Gathering them once, fully exposed; happens in forward and in backward."""
    held_scatter_us: float
    send_us: float
    """Forward to the next stage and backward to the one before, one microbatch."""
    tied_us: float
    """Summing the gradients of parameters that other stages hold too, once a step."""
    memory: Amounts

    @property
    def time_us(self) -> float:
        """One microbatch."""
        return sum(segment.time_us for segment in self.segments) + self.send_us + 2 * self.held_gather_us

    @property
    def end_us(self) -> float:
        """Once a step."""
        return sum(segment.end_us for segment in self.segments) + self.tied_us + self.held_scatter_us


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
    held = holders(setting.sg, edges)
    tied = [
        (param_of(setting, options[i], *in_class(setting.sg, start + i, (name,))), len(held[name]))
        for i, names in enumerate(owned)
        for name in names
        if len(held[name]) > 1
    ]
    ends = [edge for edge in (start, end) if 0 < edge < len(setting.sg.segments)]
    return StageCost(
        start=start,
        end=end,
        options=options,
        owned=owned,
        segments=segments,
        held=stage_held,
        held_gather_us=gather_us(setting, stage_held),
        held_scatter_us=scatter_us(setting, stage_held),
        send_us=sum(map(setting.send_us, ends)),
        tied_us=sum(tied_us(setting, params, count) for params, count in tied),
        memory=stage_memory(
            [segment.memory for segment in segments],
            setting.point.data_axis,
            in_flight=setting.point.in_flight(stage),
            optimizer_states=setting.optimizer_states,
            prelude_bytes=setting.prelude_bytes,
            held_bytes=stage_held.gathered,
        ),
    )


def tied_us(setting: Setting, params: ParamBytes, num_holders: int) -> float:
    """Time of summing the gradient of a tied parameter over the stages that hold it."""
    per_node = min(num_holders, setting.groups.pipeline.per_node)
    group = Group(size=num_holders, per_node=per_node)
    return setting.collective_us(CollectiveKind.ALL_REDUCE, trained_bytes(setting, params), group)
