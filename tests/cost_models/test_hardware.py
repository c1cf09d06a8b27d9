"""Cluster specs and cluster files."""

import os
from pathlib import Path

import pytest

from autoplan.cluster import Cluster
from autoplan.cost_models import load_cluster, load_profile
from autoplan.errors import InputError

HOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.toml"


@pytest.mark.parametrize(("spec", "printed"), [
    ("8xH100", "8xH100"),
    (" 8XH100 ", "8xH100"),
    ("1xh100-80gb", "1xH100"),
    ("16x8xA100-80GB", "16x8xA100-80GB"),
    ("1x8xNVIDIA H100", "8xH100"),
    ("4x4090", "4xRTX-4090"),
    ("2x4xrtx_4090", "2x4xRTX-4090"),
    ("8xa100-sxm4-40gb", "8xA100-40GB"),
    ("2xcpu", "2xcpu"),
])  # fmt: skip
def test_specs(spec: str, printed: str) -> None:
    cluster, profile = load_cluster(spec)
    assert str(cluster) == printed
    assert cluster.device == profile.name


def test_memory_of_gpus_is_less_the_reserve() -> None:
    cluster, _ = load_cluster("2x8xH100")
    assert cluster == Cluster(num_nodes=2, devices_per_node=8, device="H100", memory_bytes=cluster.memory_bytes)
    assert cluster.memory_bytes == int((81559 * 2**20 - 2 * 2**30) * (1 - 0.04))


def test_cpu_devices_share_the_memory_of_the_machine() -> None:
    profile = load_profile("cpu")
    one, two = (load_cluster(spec)[0].memory_bytes for spec in ("1xcpu", "2xcpu"))
    assert one == profile.usable_bytes(HOST_BYTES)
    assert two == profile.usable_bytes(HOST_BYTES // 2) < one / 2
    assert load_cluster("3x2xcpu")[0].memory_bytes == two


def test_local_is_this_machine() -> None:
    cluster, profile = load_cluster("local")
    assert (cluster.num_nodes, cluster.num_devices, profile.name) == (1, os.cpu_count(), "cpu")


@pytest.mark.parametrize(("spec", "message"), [
    ("8H100", "'8H100' is not a cluster; write it as 8xH100"),
    ("H100", "is not a cluster; write it as 8xH100"),
    ("", "is not a cluster"),
    ("8x", "is not a cluster"),
    ("-1xH100", "is not a cluster"),
    ("2x2x2x2xH100", "no hardware profile is called '2x2xH100'"),
    ("0xH100", "counts are at least 1"),
    ("0x8xH100", "counts are at least 1"),
    ("8xA100", "'A100' may be A100-40GB or A100-80GB; say which"),
    ("8xH10", "did you mean H100"),
    ("8xTPUv5", "Known: A100-40GB, A100-80GB, B200, H100, H200, H800, L4, RTX-4090, cpu"),
    ("no/such/file.toml", "cannot read the cluster file"),
    ("1000000xcpu", "use fewer devices per node"),
])  # fmt: skip
def test_bad_specs(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_cluster(spec)


def test_the_example_overrides_its_base() -> None:
    cluster, profile = load_cluster(str(EXAMPLE))
    base = load_profile("RTX-4090")
    assert str(cluster) == "2x4xlab-4090"
    assert profile.node.bandwidth_bytes_per_us == 16e3
    assert profile.node.latency_us == base.node.latency_us
    assert profile.matmul == base.matmul
    assert profile.digest != base.digest
    sources = dict(profile.sources)
    assert sources["links.node.bandwidth_gb_per_s"].text == "given in cluster.toml"
    assert sources["links.node.latency_us"] == dict(base.sources)["links.node.latency_us"]


def test_a_file_without_changes_is_its_base(tmp_path: Path) -> None:
    file = tmp_path / "plain.toml"
    file.write_text('nodes = 2\ndevices_per_node = 8\nprofile = "h200"\n')
    assert load_cluster(str(file)) == load_cluster("2x8xH200")


def test_a_capacity_replaces_host_memory(tmp_path: Path) -> None:
    file = tmp_path / "cpu.toml"
    file.write_text('nodes = 2\ndevices_per_node = 4\nprofile = "cpu"\n[memory]\ncapacity_mib = 4096\n')
    assert load_cluster(str(file))[0].memory_bytes == load_profile("cpu").usable_bytes(2**32)


def test_host_memory_replaces_a_capacity(tmp_path: Path) -> None:
    file = tmp_path / "shared.toml"
    file.write_text('nodes = 1\ndevices_per_node = 1\nprofile = "L4"\n[memory]\nhost = true\n')
    cluster, profile = load_cluster(str(file))
    assert cluster.memory_bytes == load_profile("L4").usable_bytes(HOST_BYTES)
    assert profile.host is None, "a device that has no memory of its own has nothing to copy out of it"


def test_a_cluster_file_changes_the_link_to_the_host(tmp_path: Path) -> None:
    file = tmp_path / "slots.toml"
    file.write_text('nodes = 1\ndevices_per_node = 1\nprofile = "L4"\n[links.host]\nbandwidth_gb_per_s = 16\n')
    host, base = load_cluster(str(file))[1].host, load_profile("L4").host
    assert host is not None and base is not None
    assert host.bandwidth_bytes_per_us == 16e3 == base.bandwidth_bytes_per_us / 2
    assert host.latency_us == base.latency_us


@pytest.mark.parametrize(("text", "message"), [
    ('devices_per_node = 4\nprofile = "L4"', "nodes must be a whole number of at least 1, it is missing"),
    ('nodes = 1\ndevices_per_node = 0\nprofile = "L4"', "devices_per_node must be .* found 0"),
    ('nodes = 1\ndevices_per_node = true\nprofile = "L4"', "devices_per_node must be .* found True"),
    ("nodes = 1\ndevices_per_node = 1\nprofile = 4090", "profile must be a name in quotes, found 4090"),
    ('nodes = 1\ndevices_per_node = 1\nprofile = "L5"', "no hardware profile is called 'L5'; did you mean L4"),
    ("nodes = 1\ndevices_per_node = 1", "has no name; add it: name = "),
    ('nodes = 1\ndevices_per_node = 1\nprofile = "L4"\naliases = ["x"]', "unknown key aliases"),
    ('nodes = 1\ndevices_per_node = 1\nprofile = "L4"\n[links.node]\nbandwidth_gbps = 1', "did you mean links.node.ba"),
    ('nodes = 1\ndevices_per_node = 1\nprofile = "L4"\n[links.node]\nlatency_us = 0', "positive number, found 0"),
    ("nodes = ", "not valid TOML"),
])  # fmt: skip
def test_bad_cluster_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_cluster(str(file))


def test_a_folder_is_not_a_cluster_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the cluster file"):
        load_cluster(f"{tmp_path}/")
