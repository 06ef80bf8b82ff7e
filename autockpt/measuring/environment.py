"""The environment that goes with every number: device, versions and platform."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from autockpt.devices import Device
from autockpt.schema.device import Environment

_PACKAGES = ("autockpt", "torch", "transformers", "optuna")
# Settings of PyTorch's allocator change what is reserved for the same tensors; both names are in use.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def environment_of(device: Device) -> Environment:
    """The device at hand and the versions installed. On a GPU this opens a context."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    settings = [f"{name}={os.environ[name]}" for name in _ALLOCATOR if name in os.environ]
    if settings and device.kind == "cuda":
        versions["allocator settings"] = " ".join(settings)
    return Environment(device=device.describe(), versions=versions, platform=platform.platform())
