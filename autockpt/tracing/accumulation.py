"""Additions that a plain step makes in place and a step under a dispatch mode does not.

Under any dispatch mode PyTorch takes tensors for subclasses and adds out of place in two situations: where autograd's
engine adds up gradients that meet at one node, and where an operator made of others adds a mask or a bias to the
product it has just computed (attention without a fused kernel, linear layers). Both cost memory that a plain step does
not need, so PyTorch's own rules are applied here instead. In both, nothing but PyTorch's C++ code holds the tensor that
is added to: whatever Python computes, or another dispatch mode hands on, Python holds.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

# Nodes whose own formula adds tensors of one shape; everywhere else such an addition is the engine's.
_ADDING_NODES = ("VarMeanBackward", "StdMeanBackward", "LogcumsumexpBackward", "CumprodBackward", "ProdBackward")
_use_count = torch._C._storage_Use_Count
Counts = tuple[int, int, int]  # of the tensor, its storage and its Python object


class InPlaceAdds:
    """Tells additions that a plain step would make in the memory of their first argument.

    ``sole`` are the reference counts of a tensor that C++ alone holds; None: those of the next addition.
    """

    def __init__(self, sole: Counts | None = None) -> None:
        self.sole = sole

    def of_engine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this addition of backward adds up gradients."""
        if not self._to_sole(args, kwargs):
            return False
        first, second = args
        if first.shape != second.shape or first.dtype != second.dtype or not _dense(first):
            return False
        node = torch._C._current_autograd_node()
        return node is not None and not node.name().startswith(_ADDING_NODES)

    def to_product(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an addition to what a matrix product has just computed belongs to the same operator."""
        if not self._to_sole(args, kwargs):
            return False
        product, other = args
        return torch.promote_types(product.dtype, other.dtype) == product.dtype and other.dim() <= product.dim()

    def _to_sole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if kwargs or len(args) != 2 or not all(isinstance(value, Tensor) for value in args):
            return False
        first = args[0]
        counts = first._use_count(), _use_count(first.untyped_storage()._cdata), sys.getrefcount(first)
        if self.sole is None:
            self.sole = counts
            return False
        return all(have <= sole for have, sole in zip(counts, self.sole, strict=True))


def _dense(tensor: Tensor) -> bool:
    """Non-overlapping and dense: some order of the dimensions makes it contiguous. Only then are strides handed on."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()
