"""Everything that is fixed while stages are priced at one point."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.cluster import Cluster, Group
from autoplan.cost import Collective, CostModel
from autoplan.ir import DTYPE_BYTES, SegmentedGraph
from autoplan.plan.memory import DataAxis
from autoplan.plan.plan import Precision
from autoplan.sharding import CollectiveKind
from autoplan.solver.mesh import Groups, Point, groups_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A point with the model and the hardware it is priced on."""

    sg: SegmentedGraph
    cluster: Cluster
    cost: CostModel
    point: Point
    groups: Groups
    data_axis: DataAxis
    sums: tuple[int, int]
    """Bytes in which a gradient is summed per byte of its parameter, as a fraction."""
    state_traffic: tuple[int, int]
    """Bytes that an update reads and writes per byte of the parameter, as a fraction."""
    trainable: Mapping[str, bool]
    """Parameter value to whether it is trained."""
    prelude_bytes: int
    cut_bytes: tuple[tuple[int, ...], ...]
    """For each position in the chain: local bytes of the values that cross there."""
    sequence: bool

    def collective_us(self, kind: CollectiveKind, num_bytes: int, group: Group) -> float:
        """Time of one collective; nothing for no bytes or a group of one."""
        if num_bytes == 0 or group.size == 1:
            return 0.0
        return self.cost.collective_us(Collective(kind=kind, num_bytes=num_bytes, group=group))

    def send_us(self, position: int) -> float:
        """Time to send what crosses at a position of the chain."""
        return self._sent_us(self.cut_bytes[position])

    def _sent_us(self, crossing: tuple[int, ...]) -> float:
        """Time to send values of so many bytes, one after the other."""
        return sum(self.collective_us(CollectiveKind.SEND, size, self.groups.neighbours) for size in crossing)

    @property
    def slowest_send_us(self) -> float:
        """The longest ``send_us`` between two segments."""
        inside = set(self.cut_bytes[1 : len(self.sg.segments)])
        return max(map(self._sent_us, inside), default=0.0)

    def sum_bytes(self, param_bytes: int) -> int:
        """Bytes of gradients of parameters of that size, as they are summed."""
        return -(-param_bytes * self.sums[0] // self.sums[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What every setting of a job shares."""

    held: int
    """Bytes per element of a parameter."""
    gradient: int
    summed: int
    """Of a gradient as it is summed over ranks."""
    states: int
    """Of its optimizer states and master copy together."""
    trainable: Mapping[str, bool]
    """Parameter value to whether it is trained."""
    class_params: tuple[int, ...]
    """Bytes of the parameters of a segment of each class, without those that several segments share."""
    whole_bytes: int
    trainable_bytes: int
    """Of all parameters that the chain reads, each once."""


def facts_of(sg: SegmentedGraph, precision: Precision, optimizer_states: int) -> Facts:
    """Gather them. Where the model mixes dtypes, the most frequent one stands for all."""
    kinds = Counter(param.meta.dtype for param in sg.graph.params)
    dtype = max(sorted(kinds), key=lambda name: kinds[name]) if kinds else "float32"
    reads = Counter(name for segment in sg.segments for name in segment.params)
    states = optimizer_states * DTYPE_BYTES[precision.states or precision.master or dtype]
    return Facts(
        held=DTYPE_BYTES[dtype],
        gradient=DTYPE_BYTES[precision.gradients or dtype],
        summed=DTYPE_BYTES[precision.reductions or precision.gradients or dtype],
        states=states + (DTYPE_BYTES[precision.master] if precision.master is not None else 0),
        trainable={param.value: param.trainable for param in sg.graph.params},
        class_params=tuple(
            sum(sg.graph.metas[name].num_bytes for name in sg.representative(kind).params if reads[name] == 1)
            for kind in range(len(sg.kind_names))
        ),
        whole_bytes=sum(param.meta.num_bytes for param in sg.graph.params if reads[param.value]),
        trainable_bytes=sum(p.meta.num_bytes for p in sg.graph.params if reads[p.value] and p.trainable),
    )


def data_axis_of(point: Point, facts: Facts) -> DataAxis:
    """How the data ranks of a point hold parameters."""
    return DataAxis(
        mode=point.data,
        ranks=point.degrees.data_ranks,
        num_microbatches=point.num_microbatches,
        gradients=(facts.gradient, facts.held),
        states=(0 if point.offload else facts.states, facts.held),
    )


def make_setting(
    *,
    sg: SegmentedGraph,
    cluster: Cluster,
    cost: CostModel,
    point: Point,
    facts: Facts,
    prelude_bytes: int,
    cut_bytes: tuple[tuple[int, ...], ...],
    sequence: bool,
) -> Setting:
    """A setting for a point of the search, or of a plan."""
    return Setting(
        sg=sg,
        cluster=cluster,
        cost=cost,
        point=point,
        groups=groups_of(point, cluster),
        data_axis=data_axis_of(point, facts),
        sums=(facts.summed, facts.held),
        state_traffic=(2 * facts.held + facts.gradient + 2 * facts.states, facts.held),
        trainable=facts.trainable,
        prelude_bytes=prelude_bytes,
        cut_bytes=cut_bytes,
        sequence=sequence,
    )
