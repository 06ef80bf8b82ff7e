"""A call's arguments taken apart into tensors and the rest, and put together again. No slower than it must be:
this runs on every call of every recomputed unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_TENSOR = object()  # stands for a tensor in a template
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class _Tree(NamedTuple):
    """A container of another kind that pytrees know: a named tuple, a transformers ModelOutput."""

    leaves: tuple[Any, ...]
    spec: TreeSpec


def take_apart(value: Any, tensors: list[torch.Tensor], objects: list[Any]) -> Any:
    """The template of ``value``. Its tensors are appended to ``tensors`` in order, leaves that may hide others to
    ``objects``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:
        return tuple([take_apart(part, tensors, objects) for part in value])
    if kind is dict:
        return {key: take_apart(part, tensors, objects) for key, part in value.items()}
    if kind is list:
        return [take_apart(part, tensors, objects) for part in value]
    leaves, spec = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        objects.append(value)
        return value
    return _Tree(tuple([take_apart(leaf, tensors, objects) for leaf in leaves]), spec)


def put_together(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """``value`` again, in new containers, with tensors from ``tensors``."""
    if template is _TENSOR:
        return next(tensors)
    kind = type(template)
    if kind is tuple:
        return tuple([put_together(part, tensors) for part in template])
    if kind is dict:
        return {key: put_together(part, tensors) for key, part in template.items()}
    if kind is list:
        return [put_together(part, tensors) for part in template]
    if kind is _Tree:
        return tree_unflatten([put_together(leaf, tensors) for leaf in template.leaves], template.spec)
    return template


def hidden_tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors inside argument objects that pytrees do not know (mask objects, dataclasses, BatchEncoding)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and not isinstance(value, (str, bytes, int, float, complex, type, torch.nn.Module)):
        if isinstance(value, (list, tuple)):
            parts: Any = value
        else:
            parts = (value if isinstance(value, dict) else getattr(value, "__dict__", {})).values()
        for part in parts:
            yield from hidden_tensors(part, depth - 1)
