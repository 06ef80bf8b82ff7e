"""Hooks on saved tensors around a unit's forward, and what is otherwise under them.

Assignments to the ``.data`` of a tensor that autograd has saved: autograd holds the tensor itself where an op has saved
what it was given, and backward then reads what was assigned. Hooks on saved tensors are handed another tensor over the
memory of before, and nothing leads from it to the first.

Custom autograd functions find in ``ctx.saved_tensors`` the very weights that they saved, and on activations the
attributes that were set on them. Under hooks autograd hands out new tensors over the memory that a hook gives, and what
a backward sets on those is lost: a ``.grad``, or the ``main_grad`` to which fused kernels add. But the accumulator of
such a tensor's gradient is the weight's own, and knows the weight.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autockpt.checkpointing.divergence import CheckedCall
from autockpt.checkpointing.fingerprint import layout_of, quietly
from autockpt.errors import ConflictError
from autockpt.policies.base import setting
from autockpt.policies.compiling import eagerly, run_as_it_is
from autockpt.policies.conflicts import is_wrapped, refuse_by_message
from autockpt.policies.rerun_state.tensors import place_of

_unpack = operator.methodcaller("unpack")  # no function of Python's: backward asks for every tensor
_assign: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_saved: Any = vars(torch._C._FunctionBase)["saved_tensors"]
_save: Any = BackwardCFunction.save_for_backward


class Assignments(TorchFunctionMode):
    """Refuses these within one forward of a unit. ``pack`` is the hook for what autograd saves, before the other."""

    def __init__(self, unit: str, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._unit, self._pack = unit, pack
        self._given: list[torch.Tensor] = []
        self._saved: dict[int, weakref.ref[torch.Tensor]] = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """``tensor`` lies over what autograd saves: the op's result, or what the op was given."""
        for given in self._given:
            if (place := place_of(given)) and place == place_of(tensor) and layout_of(given) == layout_of(tensor):
                self._saved[id(given)] = weakref.ref(given)
        return self._pack(tensor)

    @run_as_it_is
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _assign and (known := self._saved.get(id(args[0]))) is not None and known() is args[0]:
            raise ConflictError(
                f"{self._unit} assigns to the .data of a tensor (shape {tuple(args[0].shape)}) that backward needs: "
                "plain training would read the new values there, which are not those that forward computed with",
                remedy=f"Make a new tensor of the new values instead, or use `save` on {self._unit}.",
            )
        given = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and not is_wrapped(v)]
        with setting(self, "_given", given):
            return func(*args, **kwargs)


@contextmanager
def saving(
    unit: str, pack: Callable[[torch.Tensor], Any], observer: object = None, *, assigns: bool = False
) -> Iterator[None]:
    """Around a unit's forward: what autograd saves goes by way of ``pack``, which returns what has an ``unpack``, and
    where the unit's code ``assigns`` to a ``.data``, that is looked at. The ``observer`` learns when it has ended."""
    keep_identity()
    assignments = Assignments(unit, pack) if assigns else None
    hooks = saved_tensors_hooks(run_as_it_is(pack if assignments is None else assignments.pack), _unpack)
    try:
        with hooks, assignments or nullcontext():
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
        same = place_of(leaf) == place_of(tensor) != 0 and layout_of(leaf) == layout_of(tensor)
    return leaf if same else tensor
