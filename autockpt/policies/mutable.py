"""Values that can change and stay the same object: tensors, generators, and containers of anything, nested ones too.

Objects of other classes are taken as they are; so is what lies deeper than ten containers in each other.
"""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_DEEPEST = 10


def is_mutable(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, torch.Generator)) or _is_container(value) or _is_generator(value)


def copied(value: Any, *, clones: bool, depth: int = 0) -> Any:
    """A value with the same contents. Tensors in it stay the same, or are cloned: never those that need gradients."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone() if clones and not value.requires_grad else value
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if _is_generator(value):
        return copy.deepcopy(value)
    if not _is_container(value):
        return value
    result = copy.copy(value)
    if depth < _DEEPEST:
        for place, part in _parts(value):
            if is_mutable(part):
                result[place] = copied(part, clones=clones, depth=depth + 1)
    return result


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors that it is or contains, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif _is_container(value) and depth <= _DEEPEST:
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(part, depth + 1)


def differ(before: Any, now: Any, depth: int = 0) -> bool:
    """Whether ``now`` holds other things than when it was ``copied`` to ``before``. One tensor is taken for another."""
    if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
        return False
    if type(before) is not type(now) or not is_mutable(now):
        return before is not now
    return _generators_differ(before, now) if not _is_container(now) else _containers_differ(before, now, depth)


def _generators_differ(before: Any, now: Any) -> bool:
    if isinstance(now, torch.Generator):
        return not torch.equal(before.get_state(), now.get_state())
    return pickle.dumps(before) != pickle.dumps(now)


def _containers_differ(before: Any, now: Any, depth: int) -> bool:
    if len(before) != len(now):
        return True
    if isinstance(now, set) or depth > _DEEPEST:
        return any(a is not b for a, b in zip(before, now, strict=True))
    if isinstance(now, dict) and any(a is not b for a, b in zip(before, now, strict=True)):
        return True
    pairs = zip(_parts(before), _parts(now), strict=True)
    return any(differ(a, b, depth + 1) for (_, a), (_, b) in pairs)


def without_graphs(value: Any, depth: int = 0) -> Any:
    """The same with no tensor that holds a graph; a container that ``copied`` made is changed itself."""
    if isinstance(value, torch.Tensor):
        return value if value.is_leaf else value.detach().requires_grad_(value.requires_grad)
    if _is_container(value) and depth <= _DEEPEST:
        for place, part in _parts(value):
            if isinstance(part, torch.Tensor) or _is_container(part):
                value[place] = without_graphs(part, depth + 1)
    return value


def _parts(container: Any) -> list[tuple[Any, Any]]:
    if isinstance(container, set):
        return []
    return list(container.items() if isinstance(container, dict) else enumerate(container))


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque))


def _is_generator(value: Any) -> bool:
    return type(value) is random.Random or str(type(value).__module__).startswith("numpy.random")
