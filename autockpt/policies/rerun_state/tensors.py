"""What is known of a kind of things that can change and stay the same object, of those with a state as a whole, and of
tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from autockpt.checkpointing import fingerprint as fingerprints
from autockpt.checkpointing.fingerprint import form_of, layout_of, quietly, stream_of, why_not

COPIED_BYTES = 1 << 28
"""Tensors and arrays up to this size are copied where that is needed to put them back."""
SMALL_BYTES = 1 << 16
"""Parameters up to this size are, too: counters, scales. Of what a call is given no more is copied on first calls, in
which a step must not need more memory than in others."""
QUIET_BYTES = 1 << 20
"""Buffers up to this size are copied before every forward, as one may begin to change them."""
PLAIN = (bool, int, str, bytes)
PLAIN_TENSORS, _STRIDED = frozenset((torch.Tensor, nn.Parameter, nn.Buffer)), torch.strided


class NotPutBackError(Exception):
    """What changed has no way back."""


class Kind(Protocol):
    """What is known of a kind.

    ``close``: changes by which neither identity nor version tells (``.data``, NumPy) are looked for, too.
    ``goes_back``: whether ``put`` can do it at all.
    """

    goes_back = True

    def take(self, obj: Any, *, close: bool) -> Any:
        """What is in it, one level deep."""

    def unchanged(self, obj: Any, taken: Any) -> bool | torch.Tensor:
        """Whether it holds what was ``taken``; a truth on a device, which the host has not waited for, where only that
        device knows."""
        return self.take(obj, close=False) == taken

    def put(self, obj: Any, taken: Any) -> None:
        """Make it hold that again, in place. Raises NotPutBackError."""

    def parts(self, taken: Any) -> Iterable[tuple[str, Any]]:
        """What is in it, with how to get there."""
        return ()


class State(Kind):
    """What gives and takes its whole state: generators of random numbers, byte arrays, iterators over sequences."""

    def __init__(self, get: Callable[..., Any], put: Callable[..., Any] | None) -> None:
        self._get, self._put, self.goes_back = get, put, put is not None

    def take(self, obj: Any, *, close: bool) -> Any:
        return self._get(obj)

    def put(self, obj: Any, taken: Any) -> None:
        assert self._put is not None, "asked only what goes back"
        try:
            self._put(obj, taken)
        except (ValueError, TypeError, OSError, BufferError) as error:
            raise NotPutBackError from error


def same(a: Any, b: Any) -> bool:
    """Whether two values are one, or plain ones and alike."""
    return a is b or (type(a) is type(b) and type(a) in PLAIN and a == b)


class TensorTaken(NamedTuple):
    """``alias`` holds the memory, ``bits`` what was in it, ``print`` a fingerprint of that; None where not taken.

    ``form`` is how the tensor lay in it, ``stream`` the one that copy and fingerprint were queued on. ``glanced``: only
    by version and memory it is to be told whether it changed.
    """

    version: int
    place: int
    trains: bool
    alias: torch.Tensor | None = None
    bits: torch.Tensor | None = None
    print: torch.Tensor | int | None = None
    form: tuple[Any, ...] | None = None
    stream: Any = None
    glanced: bool = False


class Tensors(Kind):
    """Tensors. Large parameters and what needs gradients are never copied, only known by their fingerprint."""

    def take(self, obj: Any, *, close: bool, most: int | None = None) -> TensorTaken:
        """``most``: bytes of what is copied."""
        version, place = obj._version, place_of(obj)
        if not close or not place:
            return TensorTaken(version, place, obj.requires_grad)
        weight = isinstance(obj, nn.Parameter)
        most = SMALL_BYTES * (not without_values()) if weight else COPIED_BYTES if most is None else most
        copied = (weight or not obj.requires_grad) and obj.nbytes <= most
        with quietly():  # an alias is no op of the step, nor is a weight's copy, which first calls alone make
            alias = obj.detach()
            bits = alias.clone() if copied and weight else None
        if copied and not weight:
            bits = alias.clone()
        print = None if copied else fingerprint(obj)
        stream = None if without_values() else stream_of(obj.device)
        return TensorTaken(version, place, obj.requires_grad, alias, bits, print, _form(obj), stream)

    def glance(self, obj: Any) -> TensorTaken:
        """What is small may be the next to change, so it is copied; the rest is not looked at closely."""
        return self.take(obj, close=is_small(obj))._replace(glanced=True)

    def unchanged(self, obj: Any, taken: TensorTaken) -> bool | torch.Tensor:
        if (obj._version, obj.requires_grad, place_of(obj)) != (taken.version, taken.trains, taken.place):
            return False
        if taken.form is not None and _form(obj) != taken.form:
            return False
        if taken.glanced or obj.is_meta or without_values():  # on meta there is nothing in it
            return True
        if taken.bits is None:
            return _has(obj, taken)
        _wait_for(taken)
        with quietly():
            return torch.equal(obj, taken.bits) if obj.is_cpu else (obj == taken.bits).all()

    def put(self, obj: Any, taken: TensorTaken) -> None:
        if place_of(obj) != taken.place or (taken.form is not None and _form(obj) != taken.form):
            if taken.alias is None:
                raise NotPutBackError
            obj.data = taken.alias
        if taken.bits is not None:
            _wait_for(taken)
            obj.data.copy_(taken.bits)
        elif obj._version != taken.version or not _has(obj, taken):
            raise NotPutBackError
        if obj.is_leaf:
            obj.requires_grad_(taken.trains)


def is_small(tensor: torch.Tensor) -> bool:
    """Whether it is a buffer that is copied before every forward."""
    weight = isinstance(tensor, nn.Parameter) or tensor.requires_grad
    return not weight and place_of(tensor) != 0 and tensor.nbytes <= QUIET_BYTES


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return layout_of(tensor) if tensor.layout is _STRIDED else (tensor.dtype, tensor.shape)


def still_holds(taken: TensorTaken) -> bool:
    """Whether the memory that was looked at has what it had then."""
    return taken.alias is not None and bool(_has(taken.alias, taken))


def _has(tensor: torch.Tensor, taken: TensorTaken) -> bool | torch.Tensor:
    """Whether it has this fingerprint. FSDP takes the memory away between forward and backward, as it does values."""
    if taken.print is None or (now := fingerprint(tensor)) is None:
        return True
    _wait_for(taken)
    with quietly():
        return now == taken.print


def _wait_for(taken: TensorTaken) -> None:
    """What is queued from now on comes after what was taken."""
    if taken.stream is not None and (here := stream_of(taken.stream.device)) != taken.stream:
        here.wait_event(taken.stream.record_event())


def place_of(tensor: torch.Tensor) -> int:
    """The memory that a plain tensor lies in; 0 for all others, and where FSDP has taken it away."""
    plain = type(tensor) in PLAIN_TENSORS and tensor.layout is _STRIDED
    return tensor.untyped_storage()._cdata if plain else 0


def fingerprint(tensor: torch.Tensor) -> torch.Tensor | int | None:
    """Of a tensor's bits and where they stand, left on a device; None where it has none of its own."""
    if without_values() or why_not(tensor) is not None or not tensor.nbytes or tensor.is_conj() or tensor.is_neg():
        return None
    with quietly():
        print = fingerprints.fingerprint(tensor, form_of(tensor))
        return int(print) if tensor.is_cpu else print  # there nothing waits, and a tensor would count as held


def without_values() -> bool:
    """Whether what runs is a step on tensors without memory behind them, of which only versions tell."""
    return any(getattr(mode, "without_values", False) for mode in _get_current_dispatch_mode_stack())


TENSORS = Tensors()
