"""Accelerators by PyTorch's generic API: what any backend with streams and a caching allocator answers (XPU, NPU, …).

``torch.accelerator`` speaks of the one kind of accelerator that a process has. It is always asked by ``torch.device``,
never by number, so that it refuses where that is another kind.
"""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from autockpt.devices.base import MemoryReading, Peak
from autockpt.errors import DeviceOutOfMemory, MeasurementError
from autockpt.process import in_a_fork
from autockpt.schema.device import WITHOUT_STREAMS, DeviceInfo
from autockpt.schema.sizes import format_bytes

T = TypeVar("T")

# Kinds that PyTorch has a module for; one that a package registers (PrivateUse1) has the name it was given.
_KINDS = ("cuda", "xpu", "mtia", "hpu", "npu", "mps")


def kinds_in_use() -> list[str]:
    """The kinds of accelerator that this process has opened. Opens none.

    A backend that does not tell whether it was opened counts from the moment that there is a device of it.
    """
    names = dict.fromkeys((*_KINDS, torch._C._get_privateuse1_backend_name()))
    return [name for name in names if is_open(name)]


def is_open(kind: str) -> bool:
    """Whether this process uses accelerators of that kind already."""
    module = getattr(torch, kind, None)
    if module is None:
        return False
    opened = getattr(module, "is_initialized", None) or getattr(module, "device_count", int)
    return bool(opened())


def without_context(kind: str, question: Callable[[], T]) -> T | None:
    """The answer of a ``question`` that opens an accelerator, which this process then keeps no context of.

    It is asked in a fork, unless this process uses the accelerator already. None where that fails.
    """
    return question() if kind == "cpu" or is_open(kind) else in_a_fork(question)


class AcceleratorDevice:
    """One device of the kind of accelerator that PyTorch has in this process.

    A budget covers what the allocator reserves, and the context where its size is known (CUDA). It is a real limit
    where the backend lets a process set its share of the memory (``set_per_process_memory_fraction``); elsewhere
    whoever holds a budget compares it with the measured peak. Most methods open the device.
    """

    keeps_memory = True  # its allocator keeps what was freed: a plan's peak is that of later cycles than the first
    environment: Mapping[str, str] = {}  # of processes that measure there; allocator settings are the user's

    def __init__(self, kind: str, index: int = 0) -> None:
        self.kind = kind
        self.index = index
        self.torch_device = torch.device(kind, index)
        self._budget: int | None = None
        self._share = 1.0  # of the memory that the allocator had before there was a budget

    def identity(self) -> str:
        """Host, kind and number."""
        return f"{socket.gethostname()}-{self.kind}-{self.index}"

    def describe(self) -> DeviceInfo:
        """Name and memory. Raises MeasurementError where the backend's allocator tells no peak."""
        self._open()
        name = getattr(self._module, "get_device_name", None)
        return DeviceInfo(
            kind=self.kind,
            name=str(name(self.torch_device)) if name is not None else self.kind,
            capacity_bytes=self.capacity(),
            overhead_bytes=self.context_bytes(),
            copy_queues=self.kind not in WITHOUT_STREAMS,
            enforces_limit=hasattr(self._module, "set_per_process_memory_fraction"),
        )

    def capacity(self) -> int:
        """All memory of the device in bytes."""
        return self._free_and_total()[1]

    def used_by_others(self) -> int:
        """Bytes that this process's allocator does not hold; what its context takes counts here, as nothing tells."""
        free, total = self._free_and_total()
        return max(0, total - free - torch.accelerator.memory_reserved(self.torch_device))

    def context_bytes(self) -> int:
        """What this process holds on the device outside of PyTorch's allocator, where that can be known."""
        return 0

    def memory(self) -> MemoryReading:
        """What the allocator counts. Of devices whose allocator tells no peak (see ``describe``) that is nothing."""
        stats = torch.accelerator.memory_stats(self.torch_device)
        free, _ = torch.accelerator.get_memory_info(self.torch_device)
        reserved = stats.get("reserved_bytes.all.current", 0)
        return MemoryReading(
            allocated=stats.get("allocated_bytes.all.current", 0),
            allocated_peak=stats.get("allocated_bytes.all.peak", 0),
            reserved=reserved,
            reserved_peak=stats.get("reserved_bytes.all.peak", 0),
            retries=stats.get("num_alloc_retries", 0),
            free=free + reserved,
        )

    def reset_peaks(self) -> None:
        """Count peaks from now on."""
        torch.accelerator.reset_peak_memory_stats(self.torch_device)

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.accelerator.synchronize(self.torch_device)

    def measure_peak(self, fn: Callable[[], None], resident: int) -> Peak:
        """Run ``fn`` once: most reserved bytes plus the context, and most allocated bytes. ``resident`` is in both.

        Memory that the allocator cached since the last ``release`` counts as reserved, as it would while training.
        """
        self._open()
        self._set_limit()
        self.synchronize()
        self.reset_peaks()
        fn()
        self.synchronize()
        reserved = torch.accelerator.max_memory_reserved(self.torch_device)
        allocated = torch.accelerator.max_memory_allocated(self.torch_device)
        return Peak(reserved + self.context_bytes(), allocated)

    def time(self, fn: Callable[[], None]) -> float:
        """Wall seconds of ``fn`` until the device has done all of it."""
        self._set_limit()
        self.synchronize()
        start = time.perf_counter()
        fn()
        self.synchronize()
        return time.perf_counter() - start

    def out_of_memory(self, error: BaseException) -> bool:
        """PyTorch's own error, or a backend's that says so in words."""
        said = isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
        return said or isinstance(error, torch.OutOfMemoryError)

    def release(self) -> None:
        """Collect garbage, give cached memory back and reset peaks. Opens no device."""
        gc.collect()
        if is_open(self.kind):
            torch.accelerator.empty_cache()
            self.reset_peaks()

    @contextmanager
    def limit(self, budget_bytes: int | None) -> Iterator[None]:
        """Let the allocator reserve no more than the budget less the context, where the backend can limit it.

        The former limit is restored after. Raises DeviceOutOfMemory where the context alone is over the budget.
        """
        if budget_bytes is None or not hasattr(self._module, "set_per_process_memory_fraction"):
            yield
            return
        if budget_bytes <= (context := self.context_bytes()):
            raise DeviceOutOfMemory(
                f"the budget of {format_bytes(budget_bytes)} is not more than what the context of the device alone "
                f"takes, {format_bytes(context)}",
                remedy="Raise the budget.",
            )
        share_now = getattr(self._module, "get_per_process_memory_fraction", None)
        before = 1.0 if share_now is None else share_now(self.torch_device)
        outside = self._budget, self._share
        self._budget, self._share = budget_bytes, before
        self._set_limit()
        try:
            yield
        finally:
            self._budget, self._share = outside
            self._module.set_per_process_memory_fraction(before, self.torch_device)

    def _set_limit(self) -> None:
        """Where a budget holds, give the allocator what the context leaves of it now: it grows as steps run."""
        if self._budget is not None:
            room = max(0, self._budget - self.context_bytes())
            share = min(self._share, room / self.capacity())
            self._module.set_per_process_memory_fraction(share, self.torch_device)
            if torch.accelerator.memory_reserved(self.torch_device) > room:
                torch.accelerator.empty_cache()  # what it keeps is more than it may have by now

    @property
    def _module(self) -> Any:
        """PyTorch's module of this kind: ``torch.xpu``."""
        return torch.get_device_module(self.torch_device)

    def _open(self) -> None:
        """Open the device. Raises MeasurementError where its allocator does not answer what measuring takes."""
        torch.empty(1, device=self.torch_device)
        try:
            told = "reserved_bytes.all.peak" in torch.accelerator.memory_stats(self.torch_device)
            torch.accelerator.get_memory_info(self.torch_device)
        except RuntimeError:
            told = False
        if not told:
            raise MeasurementError(
                f"PyTorch's allocator for {self.kind} devices does not tell how much memory there is and the peak of "
                "what it held, so no plan can be measured there",
                remedy="Search on another device, or for a described one (autockpt search --hardware).",
            )

    def _free_and_total(self) -> tuple[int, int]:
        self._open()
        return torch.accelerator.get_memory_info(self.torch_device)
