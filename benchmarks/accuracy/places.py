"""Names of GPUs in tables -> the profile, with the network and the attention kernel that a source says it had."""

import tomllib
from dataclasses import replace
from functools import cache
from pathlib import Path

from accuracy.rows import Run
from autoplan.cluster import Cluster
from autoplan.cost_models import Profile, ProfileCostModel, load_cluster

DATA = Path(__file__).resolve().parents[1] / "data"
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
    return _cost_model(spec, run.num_devices, _generation(run.attention))


def _generation(attention: str) -> str:
    """The attention kernel by the words of a table; what says only "flash" is of the first generation."""
    words = attention.lower()
    if any(word in words for word in ("te", "cudnn", "fa3", "flash-3", "flash3", "fa4")):
        return "flash-3"
    return "flash-2" if any(word in words for word in ("flash-2", "flash2", "fa2", "sdpa")) else "flash-1"


@cache
def _efficiencies() -> dict[str, dict[str, float]]:
    found = tomllib.loads((DATA / "attention.toml").read_text(encoding="utf-8"))
    return {name: {gpu: said["share"] for gpu, said in table.items()} for name, table in found.items()}


@cache
def _cost_model(spec: str, devices: int, generation: str) -> ProfileCostModel:
    cluster, profile = _loaded(spec)
    best = next((share for gpu, share in _efficiencies()[generation].items() if gpu in profile.name), None)
    if best is not None:
        profile = replace(profile, attention=replace(profile.attention, best=best))
    per_node = min(devices, DEVICES_PER_NODE)
    found = replace(cluster, num_nodes=devices // per_node, devices_per_node=per_node)
    return ProfileCostModel(cluster=found, profile=profile)


@cache
def _loaded(spec: str) -> tuple[Cluster, Profile]:
    return load_cluster(str(DATA / "clusters" / spec) if spec.endswith(".toml") else spec)
