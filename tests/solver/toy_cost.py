"""A cost model of latencies and bandwidths only, so that solver tests depend on no hardware profile."""

from dataclasses import dataclass

from autoplan.cost import Collective, Work
from autoplan.sharding import CollectiveKind

_VOLUME = {CollectiveKind.ALL_REDUCE: 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyCost:
    """Microseconds: a launch or a latency, plus size over speed."""

    flops_per_us: float = 1e4
    bytes_per_us: float = 1e3
    link_bytes_per_us: float = 100.0
    host_bytes_per_us: float = 20.0
    latency_us: float = 2.0

    def compute_us(self, work: Work) -> float:
        return work.launches + max(work.flops / self.flops_per_us, work.num_bytes / self.bytes_per_us)

    def collective_us(self, collective: Collective) -> float:
        if collective.group.size == 1:
            return 0.0
        moved = collective.num_bytes * _VOLUME.get(collective.kind, 1.0) * (1 - 1 / collective.group.size)
        return self.latency_us + moved / self.link_bytes_per_us / (1 if not collective.group.crosses_nodes else 0.25)

    def overlap_loss(self) -> float:
        return 0.0

    def peak_flops_per_s(self, dtype: str) -> float:
        return 1e12

    def host_copy_us(self, num_bytes: int) -> float:
        return self.latency_us + num_bytes / self.host_bytes_per_us if num_bytes else 0.0
