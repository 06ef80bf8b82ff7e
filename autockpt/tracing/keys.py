"""Keys of op calls: equal for calls that have the same signature and the same kind of result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_SCALARS = frozenset({int, bool, str, type(None)})
_SETTINGS = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format, complex})
_PLAIN = frozenset({Tensor, nn.Parameter})


def call_key(args: Any, tensors: list[Tensor], mutates: bool) -> tuple[Any, ...]:
    """What a call's signature and outcome depend on; collects the tensors on the way."""
    key = []
    for value in args:
        kind = value.__class__
        if kind in _PLAIN or isinstance(value, Tensor):
            tensors.append(value)
            strided = value.layout is torch.strided
            key.append((value.size(), value.stride() if strided else (), value.dtype))
        elif kind in _SCALARS:
            key.append((kind, value))
        elif kind is float:
            # In-place ops take learning rates and the like, which change from step to step and decide nothing here.
            key.append(kind if mutates else (kind, value))
        elif isinstance(value, (list, tuple)):
            key.append(call_key(value, tensors, mutates))
        else:
            # Storages and generators by kind only: a key that held one would keep its memory alive.
            key.append((kind, value) if kind in _SETTINGS else kind)
    return tuple(key)


def keyword_key(kwargs: dict[str, Any], tensors: list[Tensor], mutates: bool) -> tuple[Any, ...]:
    """The same for keyword arguments."""
    return (tuple(kwargs), call_key(kwargs.values(), tensors, mutates)) if kwargs else ()
