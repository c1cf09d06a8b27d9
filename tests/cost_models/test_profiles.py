"""The shipped profiles and the checks on a profile file."""

import math
import re
from importlib import resources

import pytest

from autoplan.cost_models import known_profiles, load_profile, load_profile_text
from autoplan.errors import InputError

H100 = resources.files("autoplan.cost_models").joinpath("profiles", "H100.toml").read_text(encoding="utf-8")


def changed(pattern: str, new: str) -> str:
    text, count = re.subn(pattern, new, H100, count=1, flags=re.MULTILINE)
    assert count == 1, pattern
    return text


def test_shipped_names() -> None:
    assert known_profiles() == ("A100-40GB", "A100-80GB", "B200", "H100", "H200", "H800", "L4", "RTX-4090", "cpu")


@pytest.mark.parametrize("name", known_profiles())
def test_every_number_has_a_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert len(profile.sources) >= 22
    for key, source in profile.sources:
        assert source.kind in ("datasheet", "measured", "assumed"), key
        assert source.text and re.fullmatch(r"\d{4}-\d\d-\d\d", source.date), key


@pytest.mark.parametrize("name", known_profiles())
def test_numbers_are_plausible(name: str) -> None:
    profile = load_profile(name)
    assert {dtype for dtype, _ in profile.peak_flops_per_us} == {"bfloat16", "float16", "float32", "float64"}
    assert profile.node.bytes_per_us < profile.memory_bytes_per_us
    assert profile.network.bytes_per_us < profile.node.bytes_per_us
    assert profile.network.latency_us > profile.node.latency_us
    assert profile.host is None or 10e3 < profile.host.bytes_per_us < profile.memory_bytes_per_us


def test_every_device_with_memory_of_its_own_has_a_link_to_the_host() -> None:
    linked = {name for name in known_profiles() if load_profile(name).host is not None}
    assert linked == {*known_profiles()} - {"cpu"}


def test_the_link_to_the_host_is_optional() -> None:
    without = load_profile_text(H100[: H100.index("[links.host]")], "mine.toml")
    assert without.host is None
    assert without.digest != load_profile("H100").digest


def test_an_h800_is_an_h100_with_less_nvlink() -> None:
    cut, whole = load_profile("H800"), load_profile("H100")
    assert cut.node.bandwidth_bytes_per_us == 200e3 < whole.node.bandwidth_bytes_per_us
    assert dict(cut.peak_flops_per_us)["bfloat16"] == dict(whole.peak_flops_per_us)["bfloat16"]
    assert (cut.matmul, cut.attention, cut.memory) == (whole.matmul, whole.attention, whole.memory)
    assert cut.network.bandwidth_bytes_per_us == whole.network.bandwidth_bytes_per_us


@pytest.mark.parametrize(("name", "advertised_gb"), [
    ("A100-40GB", 40), ("A100-80GB", 80), ("H100", 80), ("H200", 141), ("H800", 80), ("B200", 180), ("L4", 24),
    ("RTX-4090", 24),
])  # fmt: skip
def test_memory_is_near_what_is_advertised(name: str, advertised_gb: int) -> None:
    profile = load_profile(name)
    assert profile.capacity_bytes is not None
    assert advertised_gb * 1e9 <= profile.capacity_bytes <= 1.08 * advertised_gb * 1e9
    assert 0.85 < profile.usable_bytes(profile.capacity_bytes) / profile.capacity_bytes < 0.96


def test_units_are_converted_once() -> None:
    profile = load_profile("H100")
    assert dict(profile.peak_flops_per_us)["bfloat16"] == 989e6
    assert profile.memory_bytes_per_us == 3.35e6
    assert profile.node.bandwidth_bytes_per_us == 450e3
    assert profile.capacity_bytes == 81559 * 2**20
    assert profile.reserve_bytes == 2 * 2**30


def test_digests_tell_profiles_apart_by_their_numbers() -> None:
    digests = [load_profile(name).digest for name in known_profiles()]
    assert len(set(digests)) == len(digests)
    assert load_profile("H100").digest == load_profile("h100-80gb").digest
    assert (
        load_profile_text(changed("^date = .*$", "date = 2000-01-01"), "x.toml").digest == load_profile("H100").digest
    )
    assert load_profile_text(changed("value = 989", "value = 990"), "x.toml").digest != load_profile("H100").digest


def test_aliases_are_unique() -> None:
    folder = resources.files("autoplan.cost_models").joinpath("profiles")
    texts = [folder.joinpath(f"{name}.toml").read_text(encoding="utf-8") for name in known_profiles()]
    lines = [re.search(r"^aliases = \[(.*)\]", text, re.MULTILINE) for text in texts]
    aliases = [alias.casefold() for line in lines if line for alias in re.findall(r'"(.*?)"', line[1])]
    assert len(set(aliases)) == len(aliases) > 10


@pytest.mark.parametrize(("pattern", "new", "message"), [
    (r"^peak_bf16_tflops", "peak_bf16_gflops", "unknown key compute.peak_bf16_gflops; did you mean compute.peak_bf16"),
    (r"^\[collectives\]", "[rings]", "unknown key rings; "),
    (r"^latency_us = .*$", "", "no links.node.latency_us; add it: latency_us = {"),
    (r"^name = \"NVLink.*$", "", r"no links.node.name; add it: name = "),
    (r"^name = \"PCIe.*$", "", r"no links.host.name; add it: name = \"\.\.\."),
    (r"^bandwidth_gb_per_s = \{ value = 64.*$", "", "no links.host.bandwidth_gb_per_s; add it: bandwidth_gb_per_s = {"),
    (r"value = 0.82", "value = 82", "links.host.efficiency is a fraction of the peak and at most 1, found 82"),
    (r"value = 64", "value = 0", "links.host.bandwidth_gb_per_s must be a positive number, found 0"),
    (r"^name = \"PCIe.*$", "name = 3", "links.host.name must be a text, found 3"),
    (r"^capacity_mib = .*$", "", "either memory.capacity_mib, or memory.host = true"),
    (r"^capacity_mib", "host = true\ncapacity_mib", "either memory.capacity_mib, or memory.host = true"),
    (r"value = 3350", "value = 0", "compute.bandwidth_gb_per_s must be a positive number, found 0"),
    (r"value = 3350", "value = -1", "must be a positive number, found -1"),
    (r"value = 3350", "value = nan", "must be a positive number, found nan"),
    (r"value = 3350", "value = true", "must be a positive number, found True"),
    (r"value = 3350", 'value = "fast"', "must be a positive number, found 'fast'"),
    (r"value = 0.75", "value = 75", "at most 1, found 75; 0.8 means 80 %"),
    (r"value = 0.04", "value = 1", "must be below 1, found 1"),
    (r"\{ value = 3350, .*\}", "3350", "bandwidth_gb_per_s is 3350; write it with its source: bandwidth_gb_per_s = {"),
    (r"source = \"smi\"", 'source = "rumour"', r"names the source 'rumour'; add \[sources.rumour\]"),
    (r"^kind = .*$", 'kind = "rumour"', "sources.datasheet.kind is 'rumour'; use one of datasheet, measured, assumed"),
    (r"^date = .*$", 'date = "today"', "sources.datasheet.date is 'today'; write a date without quotes"),
    (r"^date = .*$", "", "sources.datasheet needs exactly kind, text and date"),
    (r"^description = .*$", "description = 3", "description must be a text, found 3"),
    (r"^capacity_mib = .*$", "host = 1", "memory.host must be true or false, found 1"),
    (r"^name = ", "name ", "not valid TOML"),
])  # fmt: skip
def test_a_broken_profile_is_refused(pattern: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_profile_text(changed(pattern, new), "mine.toml")
    assert "mine.toml" in str(caught.value)


def test_a_device_smaller_than_the_reserve_is_refused() -> None:
    with pytest.raises(InputError, match="nothing left after a reserve of 2.00 GiB"):
        load_profile("H100").usable_bytes(2**30)


def test_a_curve_reaches_half_of_its_best_at_half_size() -> None:
    curve = load_profile("H100").matmul
    assert math.isclose(curve.time_us(curve.half_size, 1, 1.0), 2 * curve.half_size / curve.best)
    assert curve.time_us(0, 3, 1.0) == 0.0
