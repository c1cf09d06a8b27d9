"""What the cost model promises: limits, monotony, scaling and a few exact values."""

import math
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.cluster import Group
from autoplan.cost import Collective, CostModel, Work, WorkKind
from autoplan.cost_models import Profile, ProfileCostModel, known_profiles, load_cluster, load_profile
from autoplan.errors import InputError
from autoplan.sharding import CollectiveKind

PROFILES = {name: load_profile(name) for name in known_profiles()}
KINDS: tuple[WorkKind, ...] = ("matmul", "attention", "memory")
PAIRS = {CollectiveKind.SEND, CollectiveKind.RECV}

profiles = st.sampled_from(sorted(PROFILES)).map(PROFILES.__getitem__)
works = st.builds(
    Work,
    kind=st.sampled_from(KINDS),
    flops=st.integers(0, 10**16),
    num_bytes=st.integers(0, 10**12),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    launches=st.integers(0, 20),
)
groups = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 16)).map(
    lambda pair: Group(size=pair[0] * pair[1], per_node=pair[0])
)
collectives = st.builds(
    Collective, kind=st.sampled_from(CollectiveKind), num_bytes=st.integers(0, 10**12), group=groups
)
fast = settings(max_examples=60, deadline=None, derandomize=True)


def model_of(profile: Profile) -> CostModel:
    cluster, _ = load_cluster("1x8xH100")
    return ProfileCostModel(cluster=replace(cluster, device=profile.name), profile=profile)


H100 = model_of(PROFILES["H100"])


@fast
@given(works, profiles)
def test_work_is_finite_and_zero_only_for_nothing(work: Work, profile: Profile) -> None:
    time = model_of(profile).compute_us(work)
    assert math.isfinite(time)
    assert (time > 0) == bool(work.flops or work.num_bytes)


@fast
@given(works, profiles)
def test_work_is_never_faster_than_the_roofline(work: Work, profile: Profile) -> None:
    peak = profile.vector_flops_per_us if work.kind == "memory" else dict(profile.peak_flops_per_us)[work.dtype]
    bound = max(work.flops / peak, work.num_bytes / profile.memory_bytes_per_us)
    assert model_of(profile).compute_us(work) >= bound * (1 - 1e-12)


@fast
@given(works, profiles, st.integers(0, 10**12), st.integers(0, 10**10), st.integers(0, 3))
def test_more_work_takes_no_less(work: Work, profile: Profile, flops: int, num_bytes: int, launches: int) -> None:
    more = replace(
        work, flops=work.flops + flops, num_bytes=work.num_bytes + num_bytes, launches=work.launches + launches
    )
    assert model_of(profile).compute_us(more) >= model_of(profile).compute_us(work)


@fast
@given(works, profiles)
def test_half_the_work_takes_at_least_half_as_long(work: Work, profile: Profile) -> None:
    half = replace(work, flops=work.flops // 2, num_bytes=work.num_bytes // 2)
    whole = replace(work, flops=2 * half.flops, num_bytes=2 * half.num_bytes)
    assert 2 * model_of(profile).compute_us(half) >= model_of(profile).compute_us(whole) * (1 - 1e-12)


@fast
@given(works, profiles)
def test_faster_memory_takes_no_more(work: Work, profile: Profile) -> None:
    faster = replace(profile, memory_bytes_per_us=2 * profile.memory_bytes_per_us)
    assert model_of(faster).compute_us(work) <= model_of(profile).compute_us(work)


@fast
@given(collectives, profiles)
def test_collectives_are_finite_and_free_only_for_nothing(collective: Collective, profile: Profile) -> None:
    time = model_of(profile).collective_us(collective)
    assert math.isfinite(time)
    assert (time > 0) == (collective.group.size > 1 and collective.num_bytes > 0)


def wire_us(collective: Collective, profile: Profile) -> float:
    """What must cross the wire, at full bandwidth: no algorithm can be faster."""
    group, size, n = collective.group, collective.num_bytes, collective.group.size
    across = profile.network.bandwidth_bytes_per_us
    if collective.kind in PAIRS:
        return size / (across if group.crosses_nodes else profile.node.bandwidth_bytes_per_us)
    inside = (group.per_node - 1) / n * size / profile.node.bandwidth_bytes_per_us
    outside = (n - group.per_node) / n * size / across
    return max(inside, outside if collective.kind is CollectiveKind.ALL_TO_ALL else outside / group.per_node)


@fast
@given(collectives, profiles)
def test_collectives_are_never_faster_than_the_wire(collective: Collective, profile: Profile) -> None:
    bound = wire_us(collective, profile) if collective.group.size > 1 else 0.0
    assert model_of(profile).collective_us(collective) >= bound * (1 - 1e-12)


@fast
@given(collectives, profiles, st.integers(0, 10**10))
def test_more_bytes_take_no_less(collective: Collective, profile: Profile, num_bytes: int) -> None:
    more = replace(collective, num_bytes=collective.num_bytes + num_bytes)
    assert model_of(profile).collective_us(more) >= model_of(profile).collective_us(collective)


@fast
@given(collectives, profiles)
def test_half_the_bytes_take_at_least_half_as_long(collective: Collective, profile: Profile) -> None:
    half = replace(collective, num_bytes=collective.num_bytes // 2)
    whole = replace(collective, num_bytes=2 * half.num_bytes)
    assert 2 * model_of(profile).collective_us(half) >= model_of(profile).collective_us(whole) * (1 - 1e-12)


@fast
@given(collectives, profiles, st.sampled_from(["node", "network"]))
def test_faster_links_take_no_more(collective: Collective, profile: Profile, level: str) -> None:
    link = profile.node if level == "node" else profile.network
    fast_link = replace(link, bandwidth_bytes_per_us=2 * link.bandwidth_bytes_per_us, latency_us=link.latency_us / 2)
    faster = replace(profile, node=fast_link) if level == "node" else replace(profile, network=fast_link)
    assert model_of(faster).collective_us(collective) <= model_of(profile).collective_us(collective)


@fast
@given(st.integers(0, 10**12), st.integers(0, 10**10), profiles.filter(lambda profile: profile.host is not None))
def test_copies_to_the_host_grow_from_nothing(num_bytes: int, more: int, profile: Profile) -> None:
    assert profile.host is not None
    time = model_of(profile).host_copy_us(num_bytes)
    assert math.isfinite(time)
    assert (time > 0) == (num_bytes > 0)
    assert time >= num_bytes / profile.host.bandwidth_bytes_per_us
    assert model_of(profile).host_copy_us(num_bytes + more) >= time


def test_exact_copies_to_the_host() -> None:
    assert H100.host_copy_us(10**9) == pytest.approx(10 + 10**9 / (64e3 * 0.82))
    assert model_of(PROFILES["A100-80GB"]).host_copy_us(10**9) == pytest.approx(10 + 10**9 / (32e3 * 0.78))


def test_a_device_without_a_link_to_the_host_cannot_copy() -> None:
    with pytest.raises(InputError, match="cpu devices share the memory of their node: leave offload out"):
        model_of(PROFILES["cpu"]).host_copy_us(1)
    with pytest.raises(InputError, match=r"the profile L4 has no link to the memory .* add \[links.host\] with name"):
        model_of(replace(PROFILES["L4"], host=None)).host_copy_us(1)


@pytest.mark.parametrize("kind", list(CollectiveKind))
@pytest.mark.parametrize("name", known_profiles())
def test_crossing_nodes_costs_more(kind: CollectiveKind, name: str) -> None:
    model = model_of(PROFILES[name])
    inside, outside = (
        model.collective_us(Collective(kind=kind, num_bytes=2**26, group=Group(size=8, per_node=per_node)))
        for per_node in (8, 1)
    )
    assert outside > inside


def test_an_all_reduce_costs_no_more_than_its_two_halves() -> None:
    for group in (Group(size=8, per_node=8), Group(size=64, per_node=8), Group(size=4, per_node=1)):
        time = {
            kind: H100.collective_us(Collective(kind=kind, num_bytes=2**30, group=group)) for kind in CollectiveKind
        }
        assert time[CollectiveKind.ALL_REDUCE] <= time[CollectiveKind.ALL_GATHER] + time[CollectiveKind.REDUCE_SCATTER]
        assert time[CollectiveKind.SEND] == time[CollectiveKind.RECV]


def test_exact_compute() -> None:
    profile = PROFILES["H100"]
    matmul = Work(kind="matmul", flops=2 * 4096**3, num_bytes=6 * 4096**2, dtype="bfloat16")
    assert H100.compute_us(matmul) == pytest.approx(2.0 + (2 * 4096**3 + 4e9) / (989e6 * 0.68))
    add = Work(kind="memory", flops=10**6, num_bytes=10**9, dtype="bfloat16", launches=2)
    assert H100.compute_us(add) == pytest.approx(2 * 2.0 + (1e9 + 2 * 2e6) / (3.35e6 * 0.8))
    fused = replace(add, launches=0)
    assert H100.compute_us(fused) == pytest.approx(1e9 / (3.35e6 * 0.8))
    small = Work(kind="memory", flops=10, num_bytes=20, dtype="bfloat16", launches=3)
    assert H100.compute_us(small) == 3 * profile.host_us == 90.0


def test_peaks_are_those_of_matrix_work() -> None:
    assert H100.peak_flops_per_s("bfloat16") == 989e12
    assert H100.peak_flops_per_s("float32") == 67e12
    assert H100.peak_flops_per_s("int8") == 0.0


def test_exact_collectives() -> None:
    size, node, network = 10**9, 450e3 * 0.75, 50e3 * 0.9
    slowdown = PROFILES["H100"].collective_slowdown
    assert slowdown == 1.2

    def price(kind: CollectiveKind, group: Group) -> float:
        """Alone on its links."""
        return H100.collective_us(Collective(kind=kind, num_bytes=size, group=group)) / slowdown

    inside, across, column = Group(size=8, per_node=8), Group(size=16, per_node=8), Group(size=4, per_node=1)
    assert price(CollectiveKind.ALL_GATHER, inside) == pytest.approx(5 + 7 * 0.8 + 7 / 8 * size / node)
    assert price(CollectiveKind.ALL_GATHER, across) == pytest.approx(5 + 15 * 12 + 15 / 16 * size / node)
    assert price(CollectiveKind.REDUCE_SCATTER, column) == pytest.approx(5 + 3 * 12 + 3 / 4 * size / network)
    assert price(CollectiveKind.ALL_REDUCE, inside) == pytest.approx(5 + 14 * 0.8 + size / (450e3 * 0.56))
    assert price(CollectiveKind.ALL_TO_ALL, across) == pytest.approx(5 + 12 + 8 / 16 * size / network)
    assert price(CollectiveKind.BROADCAST, inside) == pytest.approx(5 + 7 * 0.8 + size / node)
    assert price(CollectiveKind.SEND, column) == pytest.approx(5 + 12 + size / network)
    assert price(CollectiveKind.SEND, inside) == pytest.approx(5 + 0.8 + size / node)


def test_a_small_all_reduce_of_many_nodes_climbs_a_tree() -> None:
    group = Group(size=512, per_node=8)
    small = H100.collective_us(Collective(kind=CollectiveKind.ALL_REDUCE, num_bytes=4, group=group))
    assert small == pytest.approx(1.2 * (5 + 2 * (7 * 0.8 + 6 * 12)), rel=1e-3)
    inside = Collective(kind=CollectiveKind.ALL_REDUCE, num_bytes=4, group=Group(size=2, per_node=2))
    assert H100.collective_us(inside) == PROFILES["H100"].collective_host_us == 25.0


def test_tensor_parallel_over_pcie_is_dearer_than_over_nvlink() -> None:
    reduce = Collective(kind=CollectiveKind.ALL_REDUCE, num_bytes=2**27, group=Group(size=4, per_node=4))
    assert model_of(PROFILES["RTX-4090"]).collective_us(reduce) > 10 * H100.collective_us(reduce)


@pytest.mark.parametrize("dtype", ["int64", "float8"])
@pytest.mark.parametrize("kind", ["matmul", "attention"])
def test_a_dtype_without_a_peak_is_an_error(kind: WorkKind, dtype: str) -> None:
    work = Work(kind=kind, flops=1, num_bytes=1, dtype=dtype)
    with pytest.raises(InputError, match=f"H100 has no peak for {dtype} matrix work, only for bfloat16, float16"):
        H100.compute_us(work)


def test_memory_work_takes_any_known_dtype() -> None:
    assert H100.compute_us(Work(kind="memory", flops=0, num_bytes=8, dtype="int64")) > 0
    with pytest.raises(InputError, match="dtype 'complex64' is not known"):
        H100.compute_us(Work(kind="memory", flops=0, num_bytes=8, dtype="complex64"))


def test_an_unknown_kind_is_an_error() -> None:
    work = Work(kind=cast(WorkKind, "convolution"), flops=1, num_bytes=1, dtype="float32")
    with pytest.raises(AssertionError):
        H100.compute_us(work)
    with pytest.raises(AssertionError):
        H100.collective_us(
            Collective(kind=cast(CollectiveKind, "gossip"), num_bytes=1, group=Group(size=2, per_node=2))
        )


def test_negative_work_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="never negative"):
        H100.compute_us(Work(kind="matmul", flops=-1, num_bytes=0, dtype="float32"))
    with pytest.raises(AssertionError, match="never negative"):
        H100.host_copy_us(-1)


def test_a_profile_of_other_hardware_is_refused() -> None:
    cluster, _ = load_cluster("8xH100")
    with pytest.raises(ValueError, match="the cluster has H100 devices, the profile is of L4"):
        ProfileCostModel(cluster=cluster, profile=PROFILES["L4"])
