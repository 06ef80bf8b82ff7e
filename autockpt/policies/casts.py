"""Autocast: to what it casts now, and its casts of leaves, which it remembers until its outermost block ends and which
may be of what these were before."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from autockpt.checkpointing.autocast import autocast_depth, autocast_is_on
from autockpt.policies.conflicts import sequence_nr

TO_COPY: Any = torch.ops.aten._to_copy.default
"""The op that casts."""
_C: Any = torch._C
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
"""How many modes are in force that look at ops."""


def may_be_remembered(tensor: torch.Tensor) -> bool:
    """Whether autocast may remember casts of it: it is a leaf that wants a gradient."""
    return tensor.requires_grad and tensor.is_leaf


def autocast_now() -> tuple[Any, ...] | None:
    """To which types autocast casts now what functions are given; None where it is off."""
    if not autocast_is_on():
        return None
    casts = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in _kinds()]
    return torch.is_autocast_cache_enabled(), *casts


@functools.cache
def _kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    kinds = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def inside_autocast() -> bool:
    """Whether a block of autocast is around this. Inside a dispatch mode autocast always says that it is off; how deep
    its blocks are nested it tells."""
    return autocast_depth() > 0


class CastsUsed:
    """Which casts of leaves one call has used. Autocast remembers them until its outermost block ends, whichever call
    or thread made them, so that one may be of a leaf's earlier values."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, bool]] = {}  # by autograd's nodes

    @property
    def count(self) -> int:
        return len(self._known)

    def by(self, results: Sequence[torch.Tensor], begin: int) -> tuple[int, list[tuple[torch.Tensor, int, bool]]]:
        """Those that a function used which began at autograd's sequence number ``begin``, and how many nodes it added,
        one less for each cast that it did not make. Of each the leaf, which of the call's casts it is, and whether the
        call made it."""
        end, seen = sequence_nr(), set[Any]()
        open_ends: list[Any] = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
        found = []
        while open_ends:
            node = open_ends.pop()
            if node in seen:
                continue
            seen.add(node)
            before = [given for given, _ in node.next_functions if given is not None]
            own = begin <= node._sequence_nr() < end
            if node.name() == "ToCopyBackward0" and before and before[0].name() == "torch::autograd::AccumulateGrad":
                found.append((before[0].variable, *self._known.setdefault(node, (len(self._known), own))))
            elif own:
                open_ends += before
        return end - begin, found


class LeavesMet:
    """Leaves that units were given in one of autocast's blocks, with their versions at first."""

    def __init__(self) -> None:
        self._block: int | None = None
        self._versions: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def changed(self, block: int, tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
        """Those that have changed since, so that autocast may remember casts of what they were before."""
        if block != self._block:
            self._block, self._versions = block, {}
        found = []
        for tensor in tensors:
            if tensor is not None and may_be_remembered(tensor):
                known = self._versions.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    self._versions[id(tensor)] = weakref.ref(tensor), tensor._version
                elif known[1] != tensor._version:
                    found.append(tensor)
        return found


leaves_met = LeavesMet()
