"""Names and specs in, ``Cluster`` and ``Profile`` out.

A SPEC says what to plan for:

    8xH100                8 devices in one node
    16x8xA100-80GB        16 nodes of 8
    4xcpu                 4 processes on this machine's CPU; each may use a quarter of its memory
    local                 one process per CPU of this machine
    path/to/cluster.toml  a cluster file, as below

A cluster file names its devices and, where they differ, the numbers of a shipped profile (``examples/cluster.toml``)::

    nodes = 2
    devices_per_node = 4
    profile = "RTX-4090"                 # a shipped profile; leave it out to give every number here
    name = "lab"                         # optional; how plans and reports call the device

    [memory]                             # all tables and keys are those of a profile and optional with `profile`
    capacity_mib = 24564
    [links.node]
    bandwidth_gb_per_s = 32              # a bare number: its source is this file
    [links.network]
    name = "100 Gb/s Ethernet, one port a node"
    bandwidth_gb_per_s = 3.1             # per device and direction: four devices share the port

A file that ``autoplan profile`` wrote also has ``[measured]``: see ``measured.py``.

Memory is what the device has; the profile's reserve is taken off here, once.
"""

import datetime
import difflib
import os
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

from autoplan.cluster import Cluster
from autoplan.cost_models.content import Content, Source, load_toml, overlay, read_content
from autoplan.cost_models.measured import read_measured
from autoplan.cost_models.profile import Profile, build_profile
from autoplan.errors import InputError

MOST_DEVICES = 1_000_000
"""A slip in a number must not keep the search busy for hours."""

_SPEC = re.compile(r"(?:(\d+)x)?(\d+)x([\w][\w .+-]*)", re.IGNORECASE)
_CLUSTER_KEYS = ("nodes", "devices_per_node", "profile", "measured")
_EXAMPLES = "8xH100, 16x8xA100-80GB (nodes x devices), 4xcpu, local, or a path ending in .toml"


def known_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles, sorted."""
    files = resources.files("autoplan.cost_models").joinpath("profiles").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load_profile(name: str) -> Profile:
    """The shipped profile of that name or alias, in any case; InputError with the known names and the nearest."""
    return build_profile(_shipped_content(_canonical_name(name)))


def load_profile_text(text: str, file: str) -> Profile:
    """A profile from the text of a TOML file; ``file`` is its name in messages. Raises InputError."""
    return build_profile(read_content(load_toml(text, file), file))


def load_cluster(spec: str) -> tuple[Cluster, Profile]:
    """The cluster that a SPEC describes, and the profile of its devices; InputError says how to write it."""
    spec = spec.strip()
    if spec.casefold() == "local":
        return _cluster(1, os.cpu_count() or 1, load_profile("cpu"))
    if spec.endswith(".toml") or "/" in spec or os.sep in spec:
        return _read_cluster_file(Path(spec))
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise InputError(f"{spec!r} is not a cluster; write it as {_EXAMPLES}")
    nodes, devices = int(match[1] or 1), int(match[2])
    if nodes < 1 or devices < 1:
        raise InputError(f"{spec!r} has no devices; the counts are at least 1, as in {_EXAMPLES}")
    return _cluster(nodes, devices, load_profile(match[3]))


def _cluster(num_nodes: int, devices_per_node: int, profile: Profile) -> tuple[Cluster, Profile]:
    """Devices with what the reserve leaves of their memory."""
    if num_nodes * devices_per_node > MOST_DEVICES:
        raise InputError(f"{num_nodes} x {devices_per_node} devices is too many to plan; at most {MOST_DEVICES:,}")
    capacity = profile.capacity_bytes
    if capacity is None:
        capacity = _physical_memory_bytes() // devices_per_node
    cluster = Cluster(
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=profile.name,
        memory_bytes=profile.usable_bytes(capacity),
    )
    return cluster, profile


def _physical_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read_cluster_file(path: Path) -> tuple[Cluster, Profile]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the cluster file {path}: {error}; a cluster is {_EXAMPLES}") from error
    document = load_toml(text, str(path))
    nodes, devices = (_count(document, key, path) for key in ("nodes", "devices_per_node"))
    numbers = {key: value for key, value in document.items() if key not in _CLUSTER_KEYS}
    modified = datetime.date.fromtimestamp(path.stat().st_mtime).isoformat()
    content = read_content(numbers, str(path), Source(kind="assumed", text=f"given in {path.name}", date=modified))
    base = document.get("profile")
    if base is not None:
        if not isinstance(base, str):
            raise InputError(f"{path}: profile must be a name in quotes, found {base!r}; known: {_known()}")
        content = overlay(_shipped_content(_canonical_name(base)), content)
    profile = build_profile(content)
    if "measured" in document:
        profile = replace(profile, measured=read_measured(document["measured"], str(path)))
    return _cluster(nodes, devices, profile)


def _count(document: dict[str, object], key: str, path: Path) -> int:
    value = document.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "it is missing" if value is None else f"found {value!r}"
        raise InputError(f"{path}: {key} must be a whole number of at least 1, {found}; write {key} = 8")
    return value


def _shipped_document(name: str) -> dict[str, object]:
    file = resources.files("autoplan.cost_models").joinpath("profiles", f"{name}.toml")
    return load_toml(file.read_text(encoding="utf-8"), f"profiles/{name}.toml")


def _shipped_content(name: str) -> Content:
    return read_content(_shipped_document(name), f"profiles/{name}.toml")


def _canonical_name(name: str) -> str:
    """The shipped profile meant by a name; InputError when none or several are."""
    wanted = _folded(name)
    names = _names()
    if wanted in names:
        return names[wanted]
    meant = sorted({known for folded, known in names.items() if folded.startswith(f"{wanted}-")})
    if len(meant) > 1:
        raise InputError(f"{name!r} may be {' or '.join(meant)}; say which")
    nearest = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    hint = f"; did you mean {names[nearest[0]]}?" if nearest else "."
    raise InputError(
        f"no hardware profile is called {name!r}{hint} Known: {_known()}. "
        "Other hardware goes into a cluster file (see examples/cluster.toml)"
    )


def _names() -> dict[str, str]:
    """Names and aliases of the shipped profiles, folded, to the name."""
    names: dict[str, str] = {}
    for name in known_profiles():
        aliases = _shipped_document(name).get("aliases", [])
        assert isinstance(aliases, list)
        names |= {_folded(str(alias)): name for alias in (name, *aliases)}
    return names


def _folded(name: str) -> str:
    """Case, separators and the maker's name do not tell profiles apart."""
    return re.sub(r"[\s_-]+", "-", name.strip().casefold()).removeprefix("nvidia-")


def _known() -> str:
    return ", ".join(known_profiles())
