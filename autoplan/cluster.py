"""The hardware by name: a cluster of equal devices, and the mesh a plan lays over it."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """``num_nodes`` x ``devices_per_node`` equal devices; ``device`` is the name of a hardware profile."""

    num_nodes: int
    devices_per_node: int
    device: str
    memory_bytes: int
    """Memory of one device that a plan may use, reserve already taken off."""

    def __post_init__(self) -> None:
        """Refuse a cluster without devices or memory."""
        for name in ("num_nodes", "devices_per_node", "memory_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"a cluster needs {name} >= 1, found {getattr(self, name)}")

    @property
    def num_devices(self) -> int:
        """Devices in all nodes."""
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        """Print as ``16x8xA100-80GB``, or ``8xH100`` for one node."""
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate: ``size`` of them, ``per_node`` in each node they touch."""

    size: int
    per_node: int

    @property
    def crosses_nodes(self) -> bool:
        """Whether the group spans more than one node."""
        return self.per_node < self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Named axes over the devices, outermost first: rank = ((pp * DP) + dp) * TP + tp for ``pp, dp, tp``."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse repeated axes and sizes below 1."""
        if len(set(self.axes)) != len(self.axes) or len(self.axes) != len(self.sizes):
            raise ValueError(f"a mesh needs one size per unique axis, found {self.axes} and {self.sizes}")
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"mesh sizes are at least 1, found {self.sizes}")

    @property
    def num_devices(self) -> int:
        """Product of the sizes."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Size of one axis."""
        return self.sizes[self.axes.index(axis)]

    def coordinates(self, rank: int) -> dict[str, int]:
        """Place of a rank on every axis."""
        found = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, found[axis] = divmod(rank, size)
        return found

    def group(self, axis: str, devices_per_node: int) -> Group:
        """The ranks along one axis, and how many of them share a node."""
        size = self.size(axis)
        stride = math.prod(self.sizes[self.axes.index(axis) + 1 :])
        return Group(size=size, per_node=max(1, min(size, devices_per_node // stride)))
