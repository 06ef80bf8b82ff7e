"""Additions that a plain step makes in place and a step under a dispatch mode does not.

Under any dispatch mode PyTorch takes tensors for subclasses and adds out of place in two situations: where autograd's
engine adds up gradients that meet at one node, and where an operator made of others adds a mask or a bias to the
product it has just computed (attention without a fused kernel, linear layers). Both cost memory that a plain step does
not need, so PyTorch's own rules are applied here instead.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from autockpt.checkpointing.recipes import Step
from autockpt.tracing.kernels.operators import Operator

# Nodes whose own formula adds tensors of one shape; everywhere else such an addition is the engine's.
_ADDING_NODES = ("VarMeanBackward", "StdMeanBackward", "LogcumsumexpBackward", "CumprodBackward", "ProdBackward")
_use_count = torch._C._storage_Use_Count
Counts = tuple[int, int, int]  # of the tensor, its storage and its Python object


class EngineAdds:
    """Tells the engine's additions from others, and whether a plain step would make them in place.

    ``sole`` are the reference counts of a gradient that the engine alone holds; None: those of the next addition.
    """

    def __init__(self, sole: Counts | None = None) -> None:
        self.sole = sole

    def in_place(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this op of backward is an addition that the engine would make in the memory of its first argument."""
        if not operator.adds or kwargs or len(args) != 2:
            return False
        first, second = args
        if not isinstance(first, Tensor) or not isinstance(second, Tensor):
            return False
        of_storage = _use_count(first.untyped_storage()._cdata)
        counts = first._use_count(), of_storage, sys.getrefcount(first)  # type: ignore[attr-defined]
        if self.sole is None:
            self.sole = counts
            return False
        if any(have > sole for have, sole in zip(counts, self.sole, strict=True)):
            return False
        if first.shape != second.shape or first.dtype != second.dtype or not _dense(first):
            return False
        node, frame = torch._C._current_autograd_node(), _caller()
        if node is None or node.name().startswith(_ADDING_NODES):
            return False
        return frame is None or frame.f_code.co_name == "_engine_run_backward"  # no Python backward is in between


class FusedAdds:
    """Recognises ``product.add(mask)`` inside one operator: the product and the addition come from one Python call."""

    def __init__(self) -> None:
        self._product: int | None = None
        self._call: list[tuple[int, int]] = []

    def reset(self) -> None:
        """Forget the last product."""
        self._product = None

    def product(self, storage: int) -> None:
        """A matrix product has been computed into ``storage``."""
        self._product, self._call = storage, _calling_instructions()

    def in_place(self, args: tuple[Any, ...], kwargs: dict[str, Any], storage: int | None) -> bool:
        """Whether an addition to a tensor in ``storage`` belongs to the operator that computed it."""
        if storage is None or storage != self._product or kwargs or len(args) != 2 or not isinstance(args[1], Tensor):
            return False
        target, other = args
        keeps_type = torch.promote_types(target.dtype, other.dtype) == target.dtype
        if not keeps_type or other.dim() > target.dim() or _by_itself():
            return False
        return self._call == _calling_instructions()


def _dense(tensor: Tensor) -> bool:
    """Non-overlapping and dense: some order of the dimensions makes it contiguous. Only then are strides handed on."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _by_itself() -> bool:
    """Whether the op is no part of another: a dispatch mode other than the recorder hands it on, as it does in a real
    step, or it is made again op by op."""
    frame = _caller()
    return frame is not None and (frame.f_code.co_name == "__torch_dispatch__" or frame.f_code is Step.run.__code__)


def _calling_instructions() -> list[tuple[int, int]]:
    """The Python instructions from which PyTorch was called: up to the second that is not in autockpt.

    One would not do: a function mode, or a user's own helper, calls all that passes through it by the same instruction.
    Nor would the frame itself, whose address is soon that of another.
    """
    frame, found, foreign = _caller(), list[tuple[int, int]](), 0
    while frame is not None and foreign < 2:
        found.append((id(frame.f_code), frame.f_lasti))
        foreign += not frame.f_globals.get("__name__", "").startswith("autockpt.")
        frame = frame.f_back
    return found


def _caller() -> FrameType | None:
    """The innermost frame outside the recorder; None on a thread that runs no other Python code.

    Another mode that hands an op on does so through PyTorch's own frame for calling operators, which is none either.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("autockpt.tracing", "torch._ops")):
        frame = frame.f_back
    return frame
