"""When two units are the same: a hashable key over everything in a module that decides what its ops cost."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import nn

from autockpt.workload.names import class_name

# Attributes that tell siblings apart without changing what they do.
_POSITIONAL = re.compile(r"(^|_)(idx|index|id|number|num)$|^layer_n|^i_")
_IGNORED = {"training", "gradient_checkpointing", "forward"}


def structure_key(module: nn.Module) -> Hashable:
    """Equal for modules of equal structure.

    Classes, parameters and buffers (shapes, dtypes, requires_grad) and settings of the module and everything below
    it. A layer's own number is not part of it; what the model's config says about just that layer is.
    """
    return tuple(
        (name, class_name(inner), tuple(_tensors(inner)), tuple(_settings(inner)))
        for name, inner in module.named_modules()
    )


def _tensors(module: nn.Module) -> Iterator[Hashable]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, tuple(buffer.shape), buffer.dtype


def _settings(module: nn.Module) -> Iterator[Hashable]:
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or name in _IGNORED or _POSITIONAL.search(name):
            continue
        plain = _normalised(value)
        if plain is not ...:
            yield name, plain
    yield from _own_settings(module)


def _own_settings(module: nn.Module) -> Iterator[Hashable]:
    """Entries of the config's per-layer lists (``layer_types``, ...) that belong to this layer."""
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(index, int) or not isinstance(layers, int) or not 0 <= index < layers:
        return
    for name, value in vars(config).items():
        about_layers = "layer" in name or "block" in name
        if about_layers and isinstance(value, (list, tuple)) and len(value) == layers:
            plain = _normalised(value[index])
            if plain is not ...:
                yield name, plain


def _normalised(value: Any) -> Hashable:
    """The part of a setting that decides costs, or Ellipsis where it says nothing.

    Of a float only whether it is zero: drop path rates grow from layer to layer, epsilons and scales cost nothing.
    """
    if value is None or isinstance(value, (bool, int, torch.dtype)):
        return value
    if isinstance(value, float):
        return value != 0.0
    if isinstance(value, str):
        return re.sub(r"\d+", "#", value)
    if isinstance(value, (list, tuple)):
        items = tuple(_normalised(item) for item in value)
        return ... if any(item is ... for item in items) else items
    return ...
