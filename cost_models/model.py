"""The cost model that plans are made with: one cluster, one profile, closed formulas."""

from dataclasses import dataclass, field, replace
from typing import final

from autoplan.cluster import Cluster
from autoplan.cost import Collective, Estimate, Work
from autoplan.cost_models import collectives, roofline
from autoplan.cost_models.measured import Times
from autoplan.cost_models.profile import Profile
from autoplan.errors import InputError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCostModel:
    """Prices work and communication of a cluster by its profile (implements ``autoplan.cost.CostModel``)."""

    cluster: Cluster
    profile: Profile
    _times: Times = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse a profile of other hardware."""
        object.__setattr__(self, "_times", Times(self.profile.measured))
        if self.cluster.device != self.profile.name:
            raise ValueError(f"the cluster has {self.cluster.device} devices, the profile is of {self.profile.name}")

    def compute_us(self, work: Work) -> float:
        """Microseconds of the work on one device; InputError for a dtype the device has no peak for."""
        known = self._times.work_us(work)
        return roofline.compute_us(work, self.profile) if known is None else known

    def estimate(self, work: Work) -> Estimate:
        """The same opened: what limits it, how far from the peak it is, and whose number that is."""
        found, known = roofline.estimate(work, self.profile), self._times.work_us(work)
        if known is None:
            return found
        return replace(
            found,
            time_us=known,
            efficiency=min(1.0, found.efficiency * found.time_us / known),
            source=f"this op at this shape, measured {self.profile.measured.date}",
        )

    def collective_us(self, collective: Collective) -> float:
        """Microseconds of the collective, alone on its links; 0 for a group of one."""
        known = self._times.collective_us(collective)
        return collectives.collective_us(collective, self.profile) if known is None else known

    def overlap_loss(self) -> float:
        """Part of a collective's time that the compute beside it loses."""
        return self.profile.overlap_loss

    def host_copy_us(self, num_bytes: int) -> float:
        """Microseconds to copy between a device and the memory of its node, alone on the link; 0 for no bytes.

        One copy one way: a + S / B of ``links.host``. Raises InputError where the profile has no such link.
        """
        assert num_bytes >= 0, f"a copy is never negative: {num_bytes} bytes"
        link = self.profile.host
        if link is None:
            raise InputError(_no_host_link(self.profile))
        return link.latency_us + num_bytes / link.bytes_per_us if num_bytes else 0.0

    def peak_flops_per_s(self, dtype: str) -> float:
        """Matrix operations of one device at its best; 0 where the dtype has no peak."""
        return dict(self.profile.peak_flops_per_us).get(dtype, 0.0) * 1e6


def _no_host_link(profile: Profile) -> str:
    """Why nothing can be copied out of a device, and what to do."""
    if profile.capacity_bytes is None:
        return f"{profile.name} devices share the memory of their node: leave offload out, it would free nothing"
    return (
        f"the profile {profile.name} has no link to the memory of its node, which offload needs; add [links.host] with "
        "name, bandwidth_gb_per_s, latency_us and efficiency to a cluster file"
    )
