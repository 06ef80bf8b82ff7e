"""A call's arguments as a list of tensors and a template of everything else.

The frame holds the tensors as autograd would. A recomputation gets detached tensors in new containers, because a layer
may write into a dict or list that it was given, and a copy of a KV cache, to which it adds. Other objects are passed as
they are.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_flatten  # torch has no public one

from autockpt.checkpointing.kv_cache import cache_type, tensors_in
from autockpt.errors import AutockptError, InPlaceError

# torch has no public question for the hooks on saved tensors that a user has set
hooks_in_force: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]
# torch has no public question for it; its trees of CUDA graphs ask this
_use_count: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]
_ALONE = torch.empty(0, device="cpu")  # made once: a steady forward asks, and each op of its own would be recorded
ATOMS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size))
"""Types of what is passed on as it is, and told apart by its value."""


class _TensorAt(int):
    """Stands in a template for the tensor at this position of the list."""

    __slots__ = ()  # no object for the garbage collector


_POSITIONS = [_TensorAt(position) for position in range(32)]


class _Tree(NamedTuple):
    """A container that only pytrees know: a named tuple, a transformers ModelOutput."""

    leaves: list[Any]
    spec: Any


class _Cache(NamedTuple):
    """A copy of a KV cache with ``positions`` in place of its tensors."""

    before: Any
    positions: list[_TensorAt]


def holders(tensor: torch.Tensor) -> int:
    """How many tensors are on the memory of one, itself included, in Python or held by PyTorch."""
    return 1 + _use_count(tensor.untyped_storage()._cdata) - _use_count(_ALONE.untyped_storage()._cdata)


def flatten(value: Any, tensors: list[torch.Tensor], generators: list[torch.Generator] | None = None) -> Any:
    """The template of ``value``. Tensors and random generators in it are appended to the lists.

    A tensor that occurs twice gets one position: attention asks whether its query is its key. Without ``generators``
    nothing will be recomputed, and KV caches are passed as they are. Otherwise they are copied; raises CannotBeCopied.
    """
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        position = 0
        for known in tensors:
            if known is value:
                break
            position += 1
        else:
            tensors.append(value)
        return _POSITIONS[position] if position < len(_POSITIONS) else _TensorAt(position)
    if kind is tuple or kind is list:
        return kind([part if type(part) in ATOMS else flatten(part, tensors, generators) for part in value])
    if kind is dict:
        items = value.items()
        return {key: part if type(part) in ATOMS else flatten(part, tensors, generators) for key, part in items}
    if kind in ATOMS:
        return value
    if generators is not None and kind is torch.Generator:
        generators.append(value)
        return value
    if generators is not None and isinstance(value, cache_type()):
        places = {id(tensor): flatten(tensor, tensors) for tensor in tensors_in(value)}
        return _Cache(copy.deepcopy(value, dict(places)), [*places.values()])
    leaves, spec = tree_flatten(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return _Tree([flatten(leaf, tensors, generators) for leaf in leaves], spec)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value``, each once and in order; of what holds itself, those before it does."""
    tensors: list[torch.Tensor] = []
    with suppress(RecursionError):
        flatten(value, tensors)
    return tensors


def unflatten(template: Any, tensors: list[torch.Tensor]) -> Any:
    """The value again, in new containers, with ``tensors`` in the place of those it had."""
    kind = type(template)
    if kind is _TensorAt:
        return tensors[template]
    if kind is tuple or kind is list:
        return kind([part if type(part) in ATOMS else unflatten(part, tensors) for part in template])
    if kind is dict:
        return {key: part if type(part) in ATOMS else unflatten(part, tensors) for key, part in template.items()}
    if kind is _Tree:
        return template.spec.unflatten([unflatten(leaf, tensors) for leaf in template.leaves])
    if kind is _Cache:
        return copy.deepcopy(template.before, {id(place): tensors[place] for place in template.positions})
    return template


class Holder(Protocol):
    """Holds a tensor that another place may have to make, and checks its version."""

    def unpack(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError where it was changed in place."""
        ...


Held = tuple[torch.Tensor, int] | Holder
"""A tensor with its version, or what holds it."""


class _Node(torch.autograd.Function):
    """Saves a tensor and does nothing else."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return anchor.view_as(anchor)


class HeldByNode:
    """A tensor as a node of autograd's holds it. For torch 2.11, which has no such object of its own for Python."""

    __slots__ = ("_output",)

    def __init__(self, tensor: torch.Tensor) -> None:
        # the output, which keeps the node: of a node alone that Python holds, autograd frees what it saved
        self._output: torch.Tensor = _Node.apply(torch.empty(0, requires_grad=True), tensor)  # type: ignore[assignment]

    def unpack(self) -> torch.Tensor:
        """As ``Holder.unpack``."""
        node: Any = self._output.grad_fn
        return node.saved_tensors[0]


# what torch.utils.checkpoint itself holds inputs by, behind torch 2.11: without a call of a Function for each
_make: Any = getattr(torch._C._autograd, "_make_saved_tensor", None)  # type: ignore[attr-defined]
save: Callable[[torch.Tensor], Holder] = HeldByNode if _make is None else functools.partial(_make, is_output=False)
"""Hold a tensor in the way of the hooks that are in force."""


def hold(tensors: Iterable[torch.Tensor]) -> list[Held]:
    """Hold inputs until backward, as autograd holds what it saves: themselves, where no hooks are in force.

    Raises RuntimeError for tensors without versions, which were made in inference mode.
    """
    if hooks_in_force(False) is not None:
        return [save(tensor) for tensor in tensors]
    return [(tensor, tensor._version) for tensor in tensors]


def unpack(held: Held, unit: str) -> torch.Tensor:
    """What is held of a call of ``unit``. Raises InPlaceError where it was changed in place since."""
    if type(held) is tuple:
        tensor, version = held
        if tensor._version != version:
            raise InPlaceError.of(tensor.size(), tensor._version, version, f"that {unit} was given or saved")
        return tensor
    try:
        return held.unpack()  # type: ignore[union-attr]
    except RuntimeError as error:
        raise_in_words(error, f"an input of {unit}", "Replace the in-place operation after this unit.")
        raise


def raise_in_words(error: RuntimeError, what: str, remedy: str) -> None:
    """Raise InPlaceError where ``error`` is autograd's own for a saved tensor that was changed in place."""
    if not isinstance(error, AutockptError) and "modified by an inplace operation" in str(error):
        raise InPlaceError(f"{what} has changed: {error}", remedy=remedy) from error
