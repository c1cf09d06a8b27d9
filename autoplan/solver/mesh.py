"""One point of level 0: mesh, schedule, microbatch and data mode, with what follows from them alone."""

import math
from dataclasses import dataclass

from autoplan.cluster import Cluster, Group, Mesh
from autoplan.plan.plan import MESH_AXES, DataMode, ScheduleKind
from autoplan.plan.words import count_text


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Degrees:
    """Sizes of the mesh axes and the order in which they lie on the network."""

    pp: int
    dp: int
    cp: int
    tp: int
    order: tuple[str, ...] = MESH_AXES
    """Outermost first."""

    @property
    def mesh(self) -> Mesh:
        """The mesh, outermost axis first."""
        return Mesh(axes=self.order, sizes=tuple(getattr(self, axis) for axis in self.order))

    @property
    def data_ranks(self) -> int:
        """Ranks that hold the same parameters before they are split among them."""
        return self.dp * self.cp


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """A candidate of the search, up to what levels 1 and 2 decide."""

    degrees: Degrees
    microbatch: int
    """Samples."""
    num_microbatches: int
    schedule: ScheduleKind = "1f1b"
    chunks: int = 1
    data: DataMode = "replicate"
    shards: int = 1
    expert: int = 1
    offload: bool = False

    @property
    def pp(self) -> int:
        """Places on the pipeline axis."""
        return self.degrees.pp

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.degrees.dp

    @property
    def cp(self) -> int:
        """Context degree."""
        return self.degrees.cp

    @property
    def tp(self) -> int:
        """Tensor degree."""
        return self.degrees.tp

    @property
    def num_stages(self) -> int:
        """Stages of the chain."""
        return self.pp * self.chunks

    @property
    def expert_shards(self) -> int:
        """Ranks that share the states of one expert."""
        ranks = self.degrees.data_ranks // self.expert
        return ranks if self.shards == self.degrees.data_ranks else max(1, self.shards // self.expert)

    def __str__(self) -> str:
        """Print as ``pp=2 dp=2 tp=2, interleaved x 2, 8 microbatches of 1, data shard``."""
        axes = [f"{axis}={getattr(self.degrees, axis)}" for axis in ("pp", "dp", "tp")]
        if self.cp > 1:
            axes.insert(2, f"cp={self.cp}")
        if self.expert > 1:
            axes.append(f"ep={self.expert}")
        parts = [" ".join(axes)]
        if self.pp > 1 and self.schedule != "1f1b":
            parts.append(self.schedule + (f" x {self.chunks}" if self.chunks > 1 else ""))
        parts.append(f"{count_text(self.num_microbatches, 'microbatch')} of {self.microbatch}")
        if self.degrees.data_ranks > 1:
            hybrid = f" over {self.shards}" if 1 < self.shards < self.degrees.data_ranks else ""
            parts.append(f"data {self.data}{hybrid}")
        if self.offload:
            parts.append("offload")
        if self.degrees.order != MESH_AXES:
            parts.append(f"axes {'/'.join(a for a in self.degrees.order if getattr(self.degrees, a) > 1)}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of one rank."""

    tensor: Group
    context: Group
    data: Group
    """All data ranks: dp x cp."""
    shard: Group
    """Data ranks that share one copy of the states; the innermost ones."""
    replicas: Group
    """One rank of each copy."""
    expert: Group
    """Data ranks over which experts are split; the innermost ones."""
    expert_data: Group
    """Data ranks that hold the same experts."""
    expert_shard: Group
    expert_replicas: Group
    pipeline: Group
    neighbours: Group
    """A sender and a receiver: the slowest pair of the pipeline."""


def groups_of(point: Point, cluster: Cluster) -> Groups:
    """Who communicates with whom, and how many of each group share a node."""
    mesh, per_node = point.degrees.mesh, cluster.devices_per_node
    pipeline, context = mesh.group("pp", per_node), mesh.group("cp", per_node)
    dp = mesh.group("dp", per_node)
    data = Group(size=dp.size * context.size, per_node=dp.per_node * context.per_node)
    shard, replicas = _inner(data, point.shards)
    expert, expert_data = _inner(data, point.expert)
    expert_shard, expert_replicas = _inner(expert_data, point.expert_shards)
    return Groups(
        tensor=mesh.group("tp", per_node),
        context=context,
        data=data,
        shard=shard,
        replicas=replicas,
        expert=expert,
        expert_data=expert_data,
        expert_shard=expert_shard,
        expert_replicas=expert_replicas,
        pipeline=pipeline,
        neighbours=Group(size=2, per_node=1 if pipeline.crosses_nodes else 2),
    )


def _inner(group: Group, size: int) -> tuple[Group, Group]:
    """The innermost ``size`` ranks of a group, and one rank of each such part."""
    inner = Group(size=size, per_node=min(size, group.per_node))
    return inner, Group(size=group.size // size, per_node=max(1, group.per_node // size))


def axis_orders(degrees: Degrees, cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Orders of the axes that give different groups; tp stays innermost, where its collectives are cheapest.

    Of orders that give the same groups the first is kept, and pp, dp, cp, tp comes first.
    """
    found: dict[tuple[tuple[int, int], ...], tuple[str, ...]] = {}
    for outer in (("pp", "dp", "cp"), ("dp", "pp", "cp"), ("pp", "cp", "dp")):
        order = (*outer, "tp")
        mesh = Degrees(pp=degrees.pp, dp=degrees.dp, cp=degrees.cp, tp=degrees.tp, order=order).mesh
        groups = [mesh.group(axis, cluster.devices_per_node) for axis in MESH_AXES]
        found.setdefault(tuple((group.size, group.per_node) for group in groups), order)
    return tuple(found.values())


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
