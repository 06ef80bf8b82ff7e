"""Casts of leaves that autocast remembers until its outermost block ends, which may be of what these were before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autockpt.policies.conflicts import sequence_nr


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
            if tensor is not None and tensor.requires_grad and tensor.is_leaf:
                known = self._versions.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    self._versions[id(tensor)] = weakref.ref(tensor), tensor._version
                elif known[1] != tensor._version:
                    found.append(tensor)
        return found


leaves_met = LeavesMet()
