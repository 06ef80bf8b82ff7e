"""Saved tensors off the device: one handle per storage, however many views of it autograd saved.

Whatever autograd holds owns the bytes: packed tensors own their storage's handle, so a forward that no backward follows
leaves nothing behind. Hooks on saved tensors switch off autograd's own check for in-place changes; here every packed
tensor, moved or not, carries a probe: an empty tensor that shares the version counter, but not the memory, of the one
that was saved.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from autockpt.checkpointing.arguments import Held
from autockpt.checkpointing.divergence import CheckedCall, CheckedTensor
from autockpt.checkpointing.fingerprint import laid_out_on, layout_of, probe_of
from autockpt.devices.base import Transport
from autockpt.errors import InPlaceError

SMALL_BYTES = 16 << 10
"""Storages below this size stay: a copy costs some tens of microseconds whatever its size, and a page is 4 KiB."""


class OffloadedCall:
    """What one forward of one unit moved off a device.

    ``before`` is the call whose forward ran before this one's; backward comes to it next. Where copies run alongside
    compute, storages are fetched before they are needed.
    """

    def __init__(self, unit: str, device: torch.device, before: OffloadedCall | None, transport: Transport) -> None:
        self.unit, self.device, self.transport = unit, device, transport
        self.storages: list[weakref.ref[OffloadedStorage]] = []
        self._before = weakref.ref(before) if before is not None else None
        self._after: weakref.ref[OffloadedCall] | None = None
        self._entered = self._fetched = False
        if before is not None:
            before._after = weakref.ref(self)

    def alive(self) -> list[OffloadedStorage]:
        """Storages that a graph still holds, in the order in which they were saved."""
        return [s for ref in self.storages if (s := ref()) is not None]

    def settle(self) -> None:
        """From here on the device memory may be used for other things."""
        for storage in self.alive():
            storage.handle.settle()

    def enter(self) -> None:
        """Backward reads from this call: fetch it and the one before it; release the one after it."""
        before = self._before() if self._before is not None else None
        if not self._entered:
            self._entered = True
            if self._after is not None and (after := self._after()) is not None:
                after._leave()
            if before is not None and not any(storage.waiting for storage in before.alive()):
                before.start_over()
        self.fetch()
        if before is not None:
            before.fetch()

    def fetch(self) -> None:
        """Start to fetch what backward has not read yet."""
        if self.transport.copy_queues and not self._fetched:
            self._fetched = True
            for storage in reversed(self.alive()):
                if storage.waiting:
                    storage.handle.fetch()

    def start_over(self) -> None:
        """A second backward over the same graph has begun."""
        self._entered = self._fetched = False
        for storage in self.alive():
            storage.waiting = storage.users

    def _leave(self) -> None:
        """Release what was fetched and not needed, as in a backward towards some inputs only."""
        self._entered = self._fetched = False
        for storage in self.alive():
            storage.handle.release()


class OffloadedStorage:
    """One storage that left the device. ``users`` packed tensors look into it, ``waiting`` of them in this backward."""

    def __init__(self, tensor: torch.Tensor, call: OffloadedCall) -> None:
        self._probe, self._version = probe_of(tensor), tensor._version
        self.call = call
        self.users = self.waiting = 0
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        self.handle = call.transport.send(whole)
        call.storages.append(weakref.ref(self))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes sent are still those of ``tensor``, which looks into the same memory."""
        return self._probe._version == tensor._version == self._version

    def bytes_for_one_user(self) -> torch.UntypedStorage:
        """The storage on the device. When every user got it, the handle lets its own copy go."""
        if not self.waiting:
            self.call.start_over()
        self.call.enter()
        storage = self.handle.get().untyped_storage()
        self.waiting -= 1
        if not self.waiting:
            self.handle.release()
        return storage


class OffloadedTensor:
    """A saved tensor whose storage left the device. ``entry``: where what comes back is compared."""

    __slots__ = ("_entry", "_layout", "_probe", "_storage", "_version")

    def __init__(self, tensor: torch.Tensor, storage: OffloadedStorage, entry: CheckedTensor | None = None) -> None:
        self._probe, self._version = probe_of(tensor), tensor._version
        self._storage, self._entry, self._layout = storage, entry, layout_of(tensor)
        storage.users += 1
        storage.waiting += 1

    def unpack(self) -> torch.Tensor:
        """As ``Holder.unpack``."""
        if self._probe._version != self._version:
            what = f"that {self._storage.call.unit} saved"
            raise InPlaceError.of(self._layout[1], self._probe._version, self._version, what)
        if self._entry is not None:
            self._entry.look_again()
        storage = self._storage.bytes_for_one_user()
        tensor = laid_out_on(storage, self._probe.device, self._layout)
        if self._entry is not None:
            self._entry.handed(tensor)
        return tensor


class OffloadHooks:
    """Decides for one forward of one unit which saved tensors leave the device. ``pack`` is the hook for autograd.

    ``outside`` are tensors that live on without this unit: masks, rotary tables, buffers. So do leaves, but for the
    ``hidden`` state. Tensors of subclasses stay, whatever they hold; a warning names each kind once. The
    ``observer`` compares what leaves.
    """

    def __init__(
        self,
        call: OffloadedCall,
        outside: Iterable[torch.Tensor],
        observer: CheckedCall | None,
        hidden: torch.Tensor | None,
    ) -> None:
        self._call, self._observer, self._moved = call, observer, 0
        # the caller keeps these alive during the forward, so an address cannot change its meaning
        self._hidden = id(hidden)
        self._outside = {address for t in outside if (address := address_of(t)) is not None}
        self._seen: dict[int, weakref.ref[OffloadedStorage]] = {}

    def pack(self, tensor: torch.Tensor) -> Held:
        # inside of forward-mode AD what is made here would be its own, without memory to copy
        if forward_ad._current_level >= 0 or not self._leaves(tensor):
            # Detached: a graph that holds its own output by way of Python is never freed. Of a leaf it is that, as
            # autograd holds it: what was set on it is there, and what is assigned to its `.data` is read by backward.
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        entry = self._observer.look_at(self._moved, tensor) if self._observer is not None else None
        self._moved += 1
        return OffloadedTensor(tensor, self._storage_of(tensor), entry)

    def _leaves(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor:
            if not isinstance(tensor, nn.Parameter) and tensor.numel() * tensor.element_size() >= SMALL_BYTES:
                _warn_of(type(tensor))
            return False
        return (
            tensor.layout is torch.strided
            and tensor.device == self._call.device
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
            and tensor.untyped_storage().nbytes() >= SMALL_BYTES
            and tensor.untyped_storage()._cdata not in self._outside
            # the graph holds leaves anyway
            and not (tensor.is_leaf and tensor.requires_grad and id(tensor) != self._hidden)
            and not _is_weight(tensor)
        )

    def _storage_of(self, tensor: torch.Tensor) -> OffloadedStorage:
        """The storage's handle, sent now where this forward has not sent these very bytes yet."""
        address = tensor.untyped_storage()._cdata
        known = self._seen.get(address)
        storage = known() if known is not None else None
        # Handles keep the source storage alive until `settle()`, which comes after this forward: until then no other
        # storage has its address.
        if storage is None or not storage.holds(tensor):
            storage = OffloadedStorage(tensor, self._call)
            self._seen[address] = weakref.ref(storage)
        return storage


@functools.cache
def _warn_of(kind: type) -> None:
    warnings.warn(
        f"offload moves plain tensors only: saved ones of the kind {kind.__name__} stay on the device. Use recompute "
        "for units that save mostly those.",
        stacklevel=2,
    )


def address_of(value: Any) -> int | None:
    """Where a tensor's memory is; None for those without one storage, as sparse ones, and for what is no tensor."""
    try:
        return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
    except (RuntimeError, NotImplementedError):
        return None


def _is_weight(tensor: torch.Tensor) -> bool:
    """A parameter, autocast's copy of one, which lives as long as the autocast block anyway, or a view of either.

    Of copies those that a graph leads back from. That of a frozen parameter, which has none, is moved.
    """
    origin = tensor if tensor._base is None else tensor._base
    if isinstance(origin, nn.Parameter):
        return True
    node: Any = origin.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)
