"""Custom autograd functions find in ``ctx.saved_tensors`` the very weights that they saved, and on activations the
attributes that were set on them.

Under hooks on saved tensors autograd hands out new tensors over the memory that a hook gives, and what a backward sets
on those is lost: a ``.grad``, or the ``main_grad`` to which fused kernels add. But the accumulator of such a tensor's
gradient is the weight's own, and knows the weight.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from autockpt.policies.fingerprints import layout_of, quietly
from autockpt.policies.rerun_state.tensors import place_of

_saved: Any = vars(torch._C._FunctionBase)["saved_tensors"]
_save: Any = BackwardCFunction.save_for_backward


@functools.cache
def keep_identity() -> None:
    """From now on, in all of the process: a graph may outlive the plan that it was made under."""
    BackwardCFunction.saved_tensors = property(_saved_tensors)  # type: ignore[attr-defined]
    BackwardCFunction.save_for_backward = _save_for_backward  # type: ignore[assignment]


def _save_for_backward(ctx: Any, *tensors: Any) -> None:
    _save(ctx, *tensors)
    ctx._attributes_of_saved = [vars(t) if type(t) is torch.Tensor else None for t in tensors]


def _saved_tensors(ctx: Any) -> tuple[Any, ...]:
    tensors = [_itself(tensor) for tensor in _saved.__get__(ctx)]
    attributes = getattr(ctx, "_attributes_of_saved", None)
    for tensor, own in zip(tensors, attributes or (), strict=False):
        if own is not None and type(tensor) is torch.Tensor and vars(tensor) is not own:
            tensor.__dict__ = own  # type: ignore[misc]
    return tuple(tensors)


def _itself(tensor: Any) -> Any:
    """The leaf that a tensor stands for; the tensor where it is that, or holds something else: a copy made by hooks."""
    if tensor is None or type(tensor) is nn.Parameter or not (tensor.requires_grad and tensor.is_leaf):
        return tensor
    with torch.inference_mode(False), torch.enable_grad(), quietly(), torch._C.DisableTorchFunction():
        node: Any = tensor.view_as(tensor).grad_fn
        leaf = node.next_functions[0][0].variable
        same = place_of(leaf) == place_of(tensor) != 0 and layout_of(leaf) == layout_of(tensor)
    return leaf if same else tensor
