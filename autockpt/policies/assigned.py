"""Hooks on saved tensors around a unit's forward, and assignments to the ``.data`` of a tensor that autograd has saved.

Autograd holds the tensor itself where an op has saved what it was given, and backward then reads what was assigned.
Hooks on saved tensors are handed another tensor over the memory of before, and nothing leads from it to the first.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from autockpt.errors import ConflictError
from autockpt.policies.base import setting
from autockpt.policies.compiling import run_as_it_is
from autockpt.policies.conflicts import is_wrapped, refuse_by_message
from autockpt.policies.fingerprints import layout_of
from autockpt.policies.identity import keep_identity
from autockpt.policies.rerun_state.tensors import place_of
from autockpt.policies.sentinels import CheckedCall

_unpack = operator.methodcaller("unpack")  # no function of Python's: backward asks for every tensor
_assign: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


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
    unit: str, pack: Callable[[torch.Tensor], Any], watch: CheckedCall | None, *, assigns: bool
) -> Iterator[None]:
    """Around a unit's forward: what autograd saves goes by way of ``pack``, which returns what has an ``unpack``, and
    where the unit's code ``assigns`` to a ``.data``, that is looked at. ``watch`` is told when it has ended."""
    keep_identity()
    assignments = Assignments(unit, pack) if assigns else None
    hooks = saved_tensors_hooks(run_as_it_is(pack if assignments is None else assignments.pack), _unpack)
    try:
        with hooks, assignments or nullcontext():
            yield
    except (RuntimeError, AssertionError) as error:
        refuse_by_message(error, unit)
        raise
    if watch is not None:
        watch.forward_ended()
