"""Custom autograd functions find in ``ctx.saved_tensors`` the very weights that they saved, under hooks, too.

Under hooks autograd returns new tensors over the memory that a hook gives. What a backward sets on those is lost: a
``.grad``, or the ``main_grad`` to which fused kernels add. But the accumulator of such a tensor's gradient is the
weight's own, and knows the weight.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from autockpt.checkpointing.fingerprint import layout_of, quietly
from autockpt.checkpointing.offloaded import address_of

_saved: Any = inspect.getattr_static(BackwardCFunction, "saved_tensors")


@functools.cache
def keep_identity() -> None:
    """From now on, in all of the process: a graph may outlive the plan that it was made under."""
    found = property(lambda ctx: tuple(map(_itself, _saved.__get__(ctx))))
    BackwardCFunction.saved_tensors = found  # type: ignore[attr-defined]


def _itself(tensor: Any) -> Any:
    """The leaf that a tensor stands for; the tensor itself where it is that leaf, or a copy that hooks made.

    A view that a function's forward has made of what it was given calls itself a leaf, and has no accumulator. Sparse,
    jagged and the like have no view to ask for one.
    """
    if tensor is None or type(tensor) is nn.Parameter or tensor.layout is not torch.strided:
        return tensor
    if not (tensor.requires_grad and tensor.is_leaf):
        return tensor
    with torch.inference_mode(False), torch.enable_grad(), quietly():
        node: Any = tensor.view_as(tensor).grad_fn
        leaf = getattr(node.next_functions[0][0], "variable", tensor)
        memory = address_of(tensor)
        same = memory is not None and memory == address_of(leaf) and layout_of(leaf) == layout_of(tensor)
    return leaf if same else tensor
