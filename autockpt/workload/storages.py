"""Tensors inside arbitrary objects, and their bytes counted once per storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# How many plain objects deep tensors are looked for: enough for a quantised weight's nested quantisation state.
_OBJECT_DEPTH = 3
# What holds no tensors; asked first because there is so much of it.
_PLAIN = (
    *(NoneType, bool, int, float, complex, str, bytes, type, torch.dtype, torch.device),
    *(FunctionType, BuiltinFunctionType, MethodType, ModuleType),
)


def nested_tensors(*roots: Any) -> Iterator[Tensor]:
    """Every tensor that the given objects hold, each tensor object once; views and aliases are not merged.

    Looks into modules (parameters, buffers, tensors kept as plain attributes), optimizers (state and groups), mappings,
    sequences, objects with ``state_dict`` and, a few levels deep, plain objects. Tensor subclasses that wrap other
    tensors (quantised, distributed) give the tensors inside. Gradients are not followed.
    """
    depths: dict[int, int] = {}
    alive: list[Any] = []  # ids are only unique among living objects
    stack = [(root, 0) for root in reversed(roots)]
    while stack:
        item, depth = stack.pop()
        if depth > _OBJECT_DEPTH or depths.get(id(item), depth + 1) <= depth:
            continue
        if isinstance(item, Tensor) and id(item) not in depths and not is_traceable_wrapper_subclass(item):
            yield item
        depths[id(item)] = depth
        alive.append(item)
        stack.extend(reversed([(m, d) for m, d in _members(item, depth) if not isinstance(m, _PLAIN)]))


def _members(item: Any, depth: int) -> Iterator[tuple[Any, int]]:
    """What to look into next, with its depth: containers are free, plain objects cost one level."""
    if isinstance(item, Tensor):
        if is_traceable_wrapper_subclass(item):
            yield from ((getattr(item, name), depth) for name in item.__tensor_flatten__()[0])
        yield from ((value, depth + 1) for value in vars(item).values())
    elif isinstance(item, nn.Module):
        for module in item.modules():
            for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
                if isinstance(value, Tensor) or type(value).__name__ == "MatmulLtState":
                    yield value, depth
    elif isinstance(item, torch.optim.Optimizer):
        yield item.state, depth
        yield item.param_groups, depth
    elif isinstance(item, Mapping):
        yield from ((value, depth) for value in item.values())
    elif isinstance(item, (list, tuple, set, frozenset)):
        yield from ((value, depth) for value in item)
    elif isinstance(item, torch.amp.GradScaler) or not callable(getattr(item, "state_dict", None)):
        yield from ((value, depth + 1) for value in getattr(item, "__dict__", {}).values())
    else:
        yield item.state_dict(), depth + 1


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind ``tensors``, each storage once and whole, however many views of it there are."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        for part in _parts(tensor):
            storage = part.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors with storages of their own that a tensor consists of: several, of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def move(value: Any, device: torch.device) -> Any:
    """The same nesting of mappings, sequences and tensors on another device; other values as they are."""

    def moved(other: Any) -> Any:
        to = getattr(other, "to", None)
        return to(device) if callable(to) and not isinstance(other, nn.Module) else other

    return each_tensor(value, lambda tensor: tensor.to(device), moved)


def each_tensor(value: Any, function: Callable[[Tensor], Tensor], others: Callable[[Any], Any] = lambda x: x) -> Any:
    """The same nesting of mappings and sequences, every tensor in it what ``function`` makes of it.

    ``others`` gets what is neither, an object with tensors of its own for instance.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        made = {key: each_tensor(item, function, others) for key, item in value.items()}
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each_tensor(item, function, others) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(each_tensor(item, function, others) for item in value)
    return others(value)


def cut_tensors(value: Any, cut: Callable[[Tensor], Tensor]) -> Any:
    """As ``each_tensor``, for a ``cut`` that gives a part of a tensor: each part without the bytes that were cut off.

    A view would hold them all, so that a smaller batch would count as many bytes as the one that it was cut from. A
    tensor that stands in several places is cut once, as a batch that is made that small holds it once.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself, so that its id stays its own

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            part = cut(tensor)
            if part is not tensor and storage_bytes([part]) > part.numel() * part.element_size():
                part = part.clone()
            made[id(tensor)] = (tensor, part)
        return made[id(tensor)][1]

    return each_tensor(value, once)


def _like(original: Any, moved: dict[Any, Any]) -> Any:
    """A mapping of the original's class, or a plain dict where that class cannot be made from one."""
    try:
        return type(original)(moved)
    except Exception:
        return moved
