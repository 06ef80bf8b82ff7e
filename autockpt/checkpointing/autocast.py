"""Autocast as it was in a forward, for a recomputation.

Autocast remembers its casts of weights until its outermost block ends. A recomputation may run in another block than
its forward. Later forwards of that block must not find the casts that the recomputation made: they may be of another
type, or of weights that are updated before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

_C: Any = torch._C
autocast_is_on: Callable[[], bool] = _C._is_any_autocast_enabled
_dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack


class AutocastState:
    """To which types autocast casts on these kinds of devices, and in which block, when this was made."""

    __slots__ = ("_block", "_kinds", "_then")

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds if len(kinds) == 1 else [k for k in kinds if torch.amp.is_autocast_available(k)]
        self._then, self._block = self._now(), autocast_block()

    @property
    def enabled(self) -> bool:
        """Whether autocast was on."""
        return any(enabled for _, enabled, _ in self._then[1])

    def _now(self) -> tuple[bool, list[tuple[str, bool, torch.dtype]]]:
        states = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds]
        return torch.is_autocast_cache_enabled(), states

    @contextmanager
    def restored(self) -> Iterator[None]:
        """As then, and afterwards as now.

        A forward may enter autocast by hand (``__enter__``), and a recomputation that stops early misses the exit.
        """
        now, depth = self._now(), autocast_depth()
        elsewhere = depth > 0 and (self._block is None or autocast_block() != self._block)
        try:
            if self._then == now and not elsewhere:
                yield
            else:
                with ExitStack() as stack:
                    for kind, enabled, dtype in self._then[1] if self._then != now else ():
                        stack.enter_context(torch.autocast(kind, dtype, enabled, self._then[0]))
                    if elsewhere:
                        stack.enter_context(without_remembered_casts())
                    yield
        finally:
            if (now, depth) != (self._now(), autocast_depth()):
                put_autocast(*now, depth)


def put_autocast(cache: bool, states: Sequence[tuple[str, bool, torch.dtype]], depth: int) -> None:
    """Make autocast what it was at this depth of its blocks."""
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(cache)
    for _ in range(autocast_depth(), depth):
        torch.autocast_increment_nesting()
    for _ in range(depth, autocast_depth()):
        torch.autocast_decrement_nesting()
    if depth == 0:  # as at the end of the outermost block
        torch.clear_autocast_cache()


def autocast_depth() -> int:
    """How many blocks of autocast are around this."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextmanager
def without_remembered_casts() -> Iterator[None]:
    """Autocast uses none of the casts that it remembers, and remembers none of those made in here."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def remembered_cast(weight: torch.Tensor) -> torch.Tensor | None:
    """What autocast makes of a matrix or some in a product: the copy that it remembers, or else one to remember. Its
    strides may be others. None where it remembers one of another type, as from a block of that type around this one."""
    saved: list[torch.Tensor] = []
    rows = weight.detach().new_empty((*weight.shape[:-2], 0, weight.size(-2))).requires_grad_()
    with torch._C.DisableTorchFunction(), torch.enable_grad(), saved_tensors_hooks(saved.append, lambda _: weight):
        try:
            torch.matmul(rows.view_as(rows), weight)  # which saves it for the gradient of no rows at all
        except RuntimeError:  # of two types
            return None
    return max(saved, key=torch.Tensor.numel)


def autocast_block() -> int | None:
    """Which of autocast's outermost blocks this is, until whose end it remembers its casts of weights; None where it is
    off. They are told apart by the cast of an empty weight: by the number that autograd gave it."""
    if not autocast_is_on():
        return None
    bias, rows, columns = _empty_product()
    before, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    modes = _disable_current_modes() if _dispatch_modes() else nullcontext()
    with torch._C.DisableTorchFunction(), modes, torch.enable_grad():
        torch.set_autocast_enabled("cpu", True)  # no block of its own, which might end that of others
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        try:
            node: Any = torch.addmm(bias, rows, columns).grad_fn  # for which nothing is saved
        finally:
            torch.set_autocast_enabled("cpu", before)
            torch.set_autocast_dtype("cpu", dtype)
    cast = None if node is None else node.next_functions[0][0]
    return 0 if cast is None else cast._sequence_nr()


@functools.cache
def _empty_product() -> tuple[torch.Tensor, ...]:
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.inference_mode(False):
        sizes = (0, 0), (0, 1), (1, 0)
        return tuple(torch.zeros(s, dtype=torch.float32, device="cpu", requires_grad=s == (0, 0)) for s in sizes)
