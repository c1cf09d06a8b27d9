"""What a measurement depends on, without torch: the device, its driver, the processor and torch's version."""

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

_MUST_MATCH = ("processor", "accelerator", "driver", "torch")


def describe() -> dict[str, str]:
    """This machine and its torch, as text by name; what it does not have is left out."""
    found = {
        "processor": _processor(),
        "cores": str(os.cpu_count() or 1),
        "accelerator": _accelerator(),
        "driver": _first_line(Path("/proc/driver/nvidia/version")),
        "torch": _torch_version(),
    }
    return {name: text for name, text in found.items() if text}


def differences(measured: Mapping[str, str]) -> tuple[str, ...]:
    """In what this machine differs from the one of a measurement, in words; nothing when the numbers hold here."""
    here = describe()
    return tuple(
        f"{name} was {measured.get(name, 'none')!r}, here it is {here.get(name, 'none')!r}"
        for name in _MUST_MATCH
        if measured.get(name) != here.get(name)
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _accelerator() -> str:
    """Names of the NVIDIA devices that the driver lists."""
    texts = [_text(file) for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    names = [line.partition(":")[2].strip() for text in texts for line in text.splitlines() if line.startswith("Model")]
    return ", ".join(sorted(set(names)))


def _torch_version() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first_line(path: Path) -> str:
    return _text(path).partition("\n")[0].strip()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
