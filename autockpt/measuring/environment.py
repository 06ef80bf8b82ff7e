"""The environment that goes with every number: device, versions and platform."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata

from autockpt.devices import Device, get_device
from autockpt.process import child_environment
from autockpt.schema.device import ALLOCATOR_SETTINGS, Environment

_PACKAGES = ("autockpt", "torch", "transformers", "optuna")
# Settings of PyTorch's allocator change what is reserved for the same tensors (both names are in use), those of the C
# library how long a step on the CPU takes.
_ALLOCATOR = {
    "cuda": ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
    "cpu": ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"),
}
_ANY_ALLOCATOR = ("PYTORCH_ALLOC_CONF",)
_PATIENCE = 60.0  # seconds
_SAY = (
    "import sys; from autockpt.measuring.environment import environment_to_measure_in as known;"
    "print(known(sys.argv[1] or None).model_dump_json())"
)


def environment_of(device: Device, variables: Mapping[str, str] = os.environ) -> Environment:
    """The device at hand and the versions installed. On a GPU this opens a context.

    ``variables`` are the environment variables of the process that measures.
    """
    versions = installed_versions()
    names = _ALLOCATOR.get(device.kind, _ANY_ALLOCATOR)
    if settings := [f"{name}={variables[name]}" for name in names if name in variables]:
        versions[ALLOCATOR_SETTINGS] = " ".join(settings)
    return Environment(device=device.describe(), versions=versions, platform=platform.platform())


def environment_to_measure_in(name: str | None) -> Environment:
    """The named device, as a process of autockpt's that measures on it sees it."""
    device = get_device(name)
    return environment_of(device, {**device.environment, **os.environ})


def environment_without_context(name: str | None) -> Environment | None:
    """The same without a context of this process's, which it would keep: a GPU is asked in a process of its own.

    None where that fails.
    """
    device = get_device(name)
    if device.kind == "cpu":
        return environment_to_measure_in(name)
    command, variables = [sys.executable, "-c", _SAY, name or ""], child_environment(device.environment)
    try:
        told = subprocess.run(command, env=variables, capture_output=True, check=True, timeout=_PATIENCE)
        return Environment.model_validate_json(told.stdout)
    except (subprocess.SubprocessError, ValueError):
        return None


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that change numbers, where installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
