"""A call's arguments taken apart into tensors and the rest, and put together again. No slower than it must be:
this runs on every call of every recomputed unit."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autockpt.policies.rerun_state.fields import attributes, own_fields, set_field

_TENSOR = object()  # stands for a tensor in a template
_MOST_OBJECTS = 400  # lists and dictionaries among them, in one call; of more the rest is handed in as it is
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class _Tree(NamedTuple):
    """A container of another kind that pytrees know: a named tuple, a transformers ModelOutput."""

    leaves: tuple[Any, ...]
    spec: TreeSpec


class _Instance:
    """An object of somebody's own class. Every run gets one of its own, with the same attributes."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.fields: dict[str, Any] = {}


def take_apart(value: Any, tensors: list[torch.Tensor], objects: list[Any], made: dict[int, Any] | None = None) -> Any:
    """The template of ``value``. Its tensors are appended to ``tensors`` in order, leaves and keys that may hide others
    to ``objects``. ``made``: templates of what was met so far and can change, for what is met again."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):  # isinstance asks for __class__, too, which may be code of the user's
        tensors.append(value)
        return _TENSOR
    if kind in _PLAIN:
        return value
    made = {} if made is None else made
    if kind is tuple:
        return tuple([take_apart(part, tensors, objects, made) for part in value])
    if id(value) in made:
        return made[id(value)]
    if kind is dict:
        made[id(value)] = named = {}
        for key, part in value.items():
            named[key] = take_apart(part, tensors, objects, made)
            if type(key) is not str and type(key) not in _PLAIN and not issubclass(type(key), torch.Tensor):
                objects.append(key)
        return named
    if kind is list:
        made[id(value)] = parts = []
        parts += [take_apart(part, tensors, objects, made) for part in value]
        return parts
    leaves, spec = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return _Tree(tuple([take_apart(leaf, tensors, objects, made) for leaf in leaves]), spec)
    fields = own_fields(value) if len(made) < _MOST_OBJECTS else None
    if fields is None:
        objects.append(value)
        return value
    made[id(value)] = instance = _Instance(kind)
    instance.fields = {name: take_apart(part, tensors, objects, made) for name, part in fields.items()}
    return instance


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, in the order of ``take_apart``."""
    tensors: list[torch.Tensor] = []
    take_apart(value, tensors, [])
    return tensors


def put_together(template: Any, tensors: Iterator[torch.Tensor], made: dict[int, Any] | None = None) -> Any:
    """``value`` again, in new containers and objects, each once, with tensors from ``tensors``."""
    if template is _TENSOR:
        return next(tensors)
    kind = type(template)
    made = {} if made is None else made
    if kind is tuple:
        return tuple([put_together(part, tensors, made) for part in template])
    if id(template) in made:
        return made[id(template)]
    if kind is dict:
        made[id(template)] = named = {}
        for key, part in template.items():
            named[key] = put_together(part, tensors, made)
        return named
    if kind is list:
        made[id(template)] = parts = []
        parts += [put_together(part, tensors, made) for part in template]
        return parts
    if kind is _Tree:
        return tree_unflatten([put_together(leaf, tensors, made) for leaf in template.leaves], template.spec)
    if kind is _Instance:
        cls = template.cls
        made[id(template)] = twin = cls() if cls is SimpleNamespace else object.__new__(cls)
        for name, part in template.fields.items():
            set_field(twin, name, put_together(part, tensors, made))
        return twin
    return template


def hidden_tensors(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors inside argument objects that pytrees do not know (mask objects, dataclasses, BatchEncoding)."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        yield value
    elif depth and not issubclass(kind, (str, bytes, int, float, complex, type, torch.nn.Module)):
        # by functions of the base classes: an object's own may do anything
        base = next((base for base in (list, tuple) if issubclass(kind, base)), None)
        fields = value if issubclass(kind, dict) else attributes(value)
        parts: Any = () if fields is None else dict.values(fields)
        for part in parts if base is None else base.__iter__(value):
            yield from hidden_tensors(part, depth - 1)
