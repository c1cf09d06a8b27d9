"""The cost model that plans are made with: one cluster, one profile, closed formulas."""

from dataclasses import dataclass
from typing import final

from autoplan.cluster import Cluster
from autoplan.cost import Collective, Work
from autoplan.cost_models import collectives, roofline
from autoplan.cost_models.profile import Profile


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCostModel:
    """Prices work and communication of a cluster by its profile (implements ``autoplan.cost.CostModel``)."""

    cluster: Cluster
    profile: Profile

    def __post_init__(self) -> None:
        """Refuse a profile of other hardware."""
        if self.cluster.device != self.profile.name:
            raise ValueError(f"the cluster has {self.cluster.device} devices, the profile is of {self.profile.name}")

    def compute_us(self, work: Work) -> float:
        """Microseconds of the work on one device; InputError for a dtype the device has no peak for."""
        return roofline.compute_us(work, self.profile)

    def collective_us(self, collective: Collective) -> float:
        """Microseconds of the collective, alone on its links; 0 for a group of one."""
        return collectives.collective_us(collective, self.profile)
