"""Pinned host memory of exact sizes for CUDA: registered with its runtime, and kept for plans that take turns.

Under WSL2, which pins part of the memory at most and may not register any, PyTorch's own pinned allocator is asked
where that fails.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from autockpt.devices.hostpool import whole_pages
from autockpt.devices.streams import AcceleratorQueues
from autockpt.errors import MeasurementError


class CudaQueues(AcceleratorQueues):
    """As for any accelerator, through memory that is registered here."""

    def host_memory(self, nbytes: int) -> torch.Tensor:
        try:
            return self._registered(whole_pages(nbytes))
        except MeasurementError as error:
            if "microsoft" not in platform.uname().release.lower():  # no WSL
                raise
            refused = error.message
        try:
            return super().host_memory(nbytes)
        except MeasurementError:
            raise MeasurementError(
                f"{refused}, and PyTorch's own pinned allocator cannot either: this is WSL2, which pins only part of "
                "the memory it was given",
                remedy="Offload fewer units, set --host-budget, give WSL more memory (memory= in .wslconfig), or run "
                "on Linux itself.",
            ) from None

    def _registered(self, size: int) -> torch.Tensor:
        if _kept is None:
            return _pinned(size, self.device)[1]
        place = next((n for n, kept in enumerate(_kept) if kept.idle and len(kept.memory) == size), None)
        if place is None:
            _kept[:] = [kept for kept in _kept if not kept.idle]
            memory, tensor = _pinned(size, self.device)
        else:
            torch.cuda.synchronize(self.device)  # copies of whoever had it before
            memory = _kept.pop(place).memory
            tensor = torch.frombuffer(memory, dtype=torch.uint8)
        _kept.append(_Kept(memory, weakref.ref(tensor.untyped_storage())))
        return tensor


@contextmanager
def pinned_memory_kept() -> Iterator[None]:
    """While the block runs, pinned memory that is no longer used stays pinned for whoever needs as much next.

    For plans that take turns: pinning takes some tenths of a second per GiB. What does not fit the next plan is given
    back before it allocates, so no more is held than by the plan that needs the most.
    """
    global _kept
    before, _kept = _kept, []
    try:
        yield
    finally:
        _kept = before


class _Kept(NamedTuple):
    """Pinned memory, and the storage over it: its Python object lives as long as any tensor that looks into it."""

    memory: _PinnedMemory
    storage: weakref.ref[torch.UntypedStorage]

    @property
    def idle(self) -> bool:
        return self.storage() is None


_kept: list[_Kept] | None = None


def _pinned(size: int, device: torch.device) -> tuple[_PinnedMemory, torch.Tensor]:
    """New memory, and all of it as a tensor. Raises MeasurementError where the host has no more, or refuses."""
    try:
        memory = _PinnedMemory(-1, size)
        if hasattr(mmap, "MADV_DONTFORK"):  # workers that load data would keep it alive
            memory.madvise(mmap.MADV_DONTFORK)
    except (OSError, MemoryError) as error:
        raise MeasurementError(
            f"the host has no {size / 2**20:.0f} MiB more for offloading ({error})",
            remedy="Free host memory, set --host-budget, or offload fewer units.",
        ) from None
    return memory, memory.pin(device)


class _PinnedMemory(mmap.mmap):
    """Anonymous memory registered with CUDA. torch's own pinned allocator rounds sizes up to powers of two."""

    _registered: tuple[int, torch.device] | None = None

    def pin(self, device: torch.device) -> torch.Tensor:
        """The memory as a pinned 1-D uint8 tensor. Raises MeasurementError where the host refuses."""
        tensor = torch.frombuffer(self, dtype=torch.uint8)
        with torch.cuda.device(device):
            code = int(_cudart().cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0))
        if code:
            _forget_error(device)
            raise MeasurementError(
                f"the host would not pin {tensor.numel() / 2**20:.0f} MiB for offloading (its runtime says {code})",
                remedy="Raise the limit on locked memory (ulimit -l), free host memory, set --host-budget, or offload "
                "fewer units.",
            )
        self._registered = tensor.data_ptr(), device
        return tensor

    def __del__(self) -> None:
        if self._registered is not None:
            address, device = self._registered
            with contextlib.suppress(Exception):
                torch.cuda.synchronize(device)
            with contextlib.suppress(Exception):
                if int(_cudart().cudaHostUnregister(address)):
                    _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """CUDA remembers a call that failed, and the next kernel of anybody is told of it: let that be one of ours."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)


def _cudart() -> Any:
    return torch.cuda.cudart()
