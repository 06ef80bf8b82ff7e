"""The birth and death of every storage, exact to the op, by weak references.

Bytes over time, and so peaks, follow from these.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from autockpt.tracing.memory import GhostMemory


class _Watch(weakref.ref):
    """A weak reference to a storage that knows which storage it was when it dies."""

    __slots__ = ("address", "cdata", "freed", "sid")
    address: int
    cdata: int
    freed: bool  # its memory is given back, though the storage lives on
    sid: int


class StorageLog:
    """Numbers storages and notes the op at which each is born and dies.

    A storage's Python object lives exactly as long as the storage itself, however many tensors, saved tensors or C++
    references share it, so the death of a weak reference is the moment the memory goes back to the allocator.
    ``clock`` is the index of the op that runs next; between two ops the one that ran last is ``clock - 1``.
    """

    def __init__(self, memory: GhostMemory | None = None) -> None:
        self.memory = memory
        self.clock = 0
        self.bytes: list[int] = []
        self.birth: list[int] = []
        self.death: list[int | None] = []
        self._alive: dict[int, _Watch] = {}  # by the storage's C++ address
        self._died = self._on_death

    def restart(self) -> None:
        """Forget dead storages and renumber the living ones, as alive before op 0."""
        self.clock = 0
        self.bytes, self.birth, self.death = [], [], []
        for watch in self._alive.values():
            storage = watch()
            watch.sid = self._enter(0 if storage is None or watch.freed else storage.nbytes(), -1)

    def ghost(self, nbytes: int, birth: int) -> tuple[torch.UntypedStorage, int]:
        """A new storage in ghost memory and its number."""
        assert self.memory is not None
        storage = self.memory.allocate(nbytes)
        return storage, self._watch(storage, birth, storage.data_ptr())

    def watch(self, storage: torch.UntypedStorage, birth: int) -> int:
        """The number of a storage, which is born now at op ``birth`` if it has not been seen before (-1: resident)."""
        watch = self._alive.get(storage._cdata)
        return watch.sid if watch is not None else self._watch(storage, birth, 0)

    def find(self, tensor: Tensor) -> int | None:
        """The number of the storage behind a tensor, if it is known."""
        watch = self._alive.get(tensor.untyped_storage()._cdata)
        return None if watch is None else watch.sid

    def adopt(self, tensors: Iterable[Tensor]) -> None:
        """Watch the storages of tensors that were there before the log was."""
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self.watch(tensor.untyped_storage(), -1)

    def free(self, storage: torch.UntypedStorage) -> bool:
        """Note that a storage's memory is given back while it lives on; False where it is not watched."""
        watch = self._alive.get(storage._cdata)
        if watch is not None and not watch.freed:
            watch.freed, self.death[watch.sid] = True, self.clock - 1
        return watch is not None

    def refill(self, storage: torch.UntypedStorage) -> bool:
        """Note that a storage has memory again, under a new number; False where it is not watched."""
        watch = self._alive.get(storage._cdata)
        if watch is not None and watch.freed:
            watch.freed, watch.sid = False, self._enter(storage.nbytes(), self.clock)
        return watch is not None

    def _watch(self, storage: torch.UntypedStorage, birth: int, address: int) -> int:
        watch = _Watch(storage, self._died)
        watch.cdata = cdata = storage._cdata
        watch.address, watch.freed = address, False
        watch.sid = sid = self._enter(storage.nbytes(), birth)
        self._alive[cdata] = watch
        return sid

    def _enter(self, nbytes: int, birth: int) -> int:
        self.bytes.append(nbytes)
        self.birth.append(birth)
        self.death.append(None)
        return len(self.bytes) - 1

    def _on_death(self, watch: _Watch) -> None:
        if not watch.freed:
            self.death[watch.sid] = self.clock - 1
        if self._alive.get(watch.cdata) is watch:
            del self._alive[watch.cdata]
        if watch.address and self.memory is not None:
            self.memory.release(watch.address)
