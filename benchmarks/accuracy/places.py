"""Names of GPUs in tables -> the profile, and the network that a source says it had."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from accuracy.rows import Run
from autoplan.cluster import Cluster
from autoplan.cost_models import Profile, ProfileCostModel, load_cluster

CLUSTERS = Path(__file__).resolve().parents[1] / "data" / "clusters"
DEVICES_PER_NODE = 8
_PLACES = (
    ("EFA", "H100", "h100-p5-efa.toml"),
    ("4x100Gb RoCE", "A100", "a100-roce-4x100.toml"),
    ("", "B200", "8xB200"),
    ("", "H200", "8xH200"),
    ("", "H100", "8xH100"),
    ("", "H800", "8xH800"),
    ("", "A800-80GB", "8xA100-80GB"),
    ("40GB", "A100", "8xA100-40GB"),
    ("", "A100", "8xA100-80GB"),
)
"""Words of the network or the memory, words of the device, and a cluster; the first that fits."""


def cost_model_of(run: Run) -> ProfileCostModel | None:
    """The cluster of a run with its prices; None where no profile is of its GPU, or nodes are not whole."""
    spec = next((spec for network, gpu, spec in _PLACES if network in run.gpu and gpu in run.gpu), None)
    if spec is None or (run.num_devices > DEVICES_PER_NODE and run.num_devices % DEVICES_PER_NODE):
        return None
    return _cost_model(spec, run.num_devices)


@cache
def _cost_model(spec: str, devices: int) -> ProfileCostModel:
    cluster, profile = _loaded(spec)
    per_node = min(devices, DEVICES_PER_NODE)
    found = replace(cluster, num_nodes=devices // per_node, devices_per_node=per_node)
    return ProfileCostModel(cluster=found, profile=profile)


@cache
def _loaded(spec: str) -> tuple[Cluster, Profile]:
    return load_cluster(str(CLUSTERS / spec) if spec.endswith(".toml") else spec)
