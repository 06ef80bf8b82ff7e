"""Hooks on saved tensors around a unit's forward, and what they would hide from custom autograd functions.

Custom autograd functions find in ``ctx.saved_tensors`` the very weights that they saved, and on activations the
attributes that were set on them. Under hooks autograd hands out new tensors over the memory that a hook gives, and what
a backward sets on those is lost: a ``.grad``, or the ``main_grad`` to which fused kernels add. But the accumulator of
such a tensor's gradient is the weight's own, and knows the weight.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks

from autockpt.checkpointing.divergence import CheckedCall
from autockpt.checkpointing.fingerprint import layout_of, quietly
from autockpt.policies.compiling import eagerly, run_as_it_is
from autockpt.policies.conflicts import refuse_by_message

_unpack = operator.methodcaller("unpack")  # no function of Python's: backward asks for every tensor
_saved: Any = vars(torch._C._FunctionBase)["saved_tensors"]
_save: Any = BackwardCFunction.save_for_backward
_PLAIN = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))


@contextmanager
def saving(unit: str, pack: Callable[[torch.Tensor], Any], observer: object = None) -> Iterator[None]:
    """Around a unit's forward: what autograd saves goes by way of ``pack``, which returns what has an ``unpack``. The
    ``observer`` learns when it has ended."""
    keep_identity()
    try:
        with saved_tensors_hooks(run_as_it_is(pack), _unpack):
            yield
    except (RuntimeError, AssertionError) as error:
        refuse_by_message(error, unit)
        raise
    if isinstance(observer, CheckedCall):
        _forward_ended(observer)


_forward_ended = eagerly(CheckedCall.forward_ended)


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
        same = _memory_of(leaf) == _memory_of(tensor) != 0 and layout_of(leaf) == layout_of(tensor)
    return leaf if same else tensor


def _memory_of(tensor: torch.Tensor) -> int:
    """Of a plain tensor; 0 for all others, and where FSDP has taken it away."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided
    return tensor.untyped_storage()._cdata if plain else 0
