"""One point of level 0: mesh degrees, microbatch and data mode, with what follows from them alone."""

import math
from dataclasses import dataclass

from autoplan.cluster import Cluster, Group, Mesh
from autoplan.plan.memory import DataAxis
from autoplan.plan.plan import DataMode
from autoplan.plan.words import count_text


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """Degrees of the mesh, samples per microbatch and how the data axis holds parameters."""

    pp: int
    dp: int
    tp: int
    microbatch: int
    num_microbatches: int
    data: DataMode

    @property
    def degrees(self) -> tuple[int, int, int]:
        """The mesh alone."""
        return self.pp, self.dp, self.tp

    @property
    def mesh(self) -> Mesh:
        """The mesh, outermost axis first."""
        return Mesh(axes=("pp", "dp", "tp"), sizes=self.degrees)

    @property
    def data_axis(self) -> DataAxis:
        """For the memory formula."""
        return DataAxis(mode=self.data, degree=self.dp, num_microbatches=self.num_microbatches)

    def in_flight(self, stage: int) -> int:
        """Microbatches whose activations a stage holds at its peak under 1F1B."""
        return min(self.num_microbatches, self.pp - stage)

    def groups(self, cluster: Cluster) -> "Groups":
        """Who communicates with whom."""
        pipeline = self.mesh.group("pp", cluster.devices_per_node)
        return Groups(
            tensor=self.mesh.group("tp", cluster.devices_per_node),
            data=self.mesh.group("dp", cluster.devices_per_node),
            pipeline=pipeline,
            neighbours=Group(size=2, per_node=1 if pipeline.crosses_nodes else 2),
        )

    def __str__(self) -> str:
        """Print as ``pp=2 dp=2 tp=2, 8 microbatches of 1, data shard``."""
        mode = f", data {self.data}" if self.dp > 1 else ""
        count = count_text(self.num_microbatches, "microbatch")
        return f"pp={self.pp} dp={self.dp} tp={self.tp}, {count} of {self.microbatch}{mode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of one rank; ``neighbours`` is a sender and a receiver, the slowest pair of the pipeline."""

    tensor: Group
    data: Group
    pipeline: Group
    neighbours: Group


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))
