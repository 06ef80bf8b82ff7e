"""The environment in which numbers are measured: device, versions and platform."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata

from autockpt.devices import Device, get_device
from autockpt.devices.accelerator import without_context
from autockpt.schema.device import ALLOCATOR_SETTINGS, Environment

_PACKAGES = ("autockpt", "torch", "transformers", "optuna")
# Settings of PyTorch's allocator change what is reserved for the same tensors (both names are in use), those of the C
# library how long a step on the CPU takes.
_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"


def environment_of(device: Device, variables: Mapping[str, str] = os.environ) -> Environment:
    """The local device and the installed versions. On a GPU this opens a context.

    ``variables`` are the environment variables of the process that measures.
    """
    versions = installed_versions()
    if settings := [f"{name}={variables[name]}" for name in _ALLOCATOR if name in variables]:
        versions[ALLOCATOR_SETTINGS] = " ".join(settings)
    return Environment(device=device.describe(), versions=versions, platform=platform.platform())


def environment_to_measure_in(name: str | None) -> Environment:
    """The named device, as a process of autockpt's that measures on it sees it."""
    device = get_device(name)
    return environment_of(device, {**device.environment, **os.environ})


def environment_without_context(name: str | None) -> Environment | None:
    """The same without a context of this process's, which it would keep. None where that fails."""
    return without_context(get_device(name).kind, lambda: environment_to_measure_in(name))


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that change numbers, where installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
