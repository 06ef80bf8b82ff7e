"""NVIDIA GPUs: peaks of PyTorch's caching allocator, and a budget as a limit that the allocator enforces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from autockpt.devices import nvml
from autockpt.devices.accelerator import AcceleratorDevice
from autockpt.devices.base import Peak
from autockpt.errors import DeviceOutOfMemory
from autockpt.schema.sizes import format_bytes

# The variable that cuBLAS' workspace is chosen by, and a value that PyTorch calls deterministic.
WORKSPACE, DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # what making a handle says where there is no room for it
    "CUDNN_STATUS_ALLOC_FAILED",
)
# More than what kernels and libraries that are loaded while steps run take beside the context at its start.
_MOST_LOADED = 1 << 30
# What a convolution says where none of cuDNN's ways could be taken: for want of memory, or for another reason.
_NO_WAY = "unable to find an engine to execute this computation"


class CudaDevice(AcceleratorDevice):
    """One GPU: an accelerator that also tells what its context takes, and asks the driver without opening one.

    Nothing touches CUDA before a method that has to; those that do are for worker processes. ``capacity``,
    ``used_by_others`` and ``count`` ask the driver's management library and open no context, unless that library is
    missing. A budget covers reserved memory plus the *context*: what this process holds on the GPU outside of PyTorch's
    allocator (CUDA itself, loaded kernels, libraries). It grows while kernels are loaded, so it is measured anew each
    time, and once more between a plan's warm-up and what is measured, where the limit follows it. With
    ``expandable_segments:True`` the allocator reserves less for the same tensors, and the limit holds likewise: plan
    with the same allocator settings as you train with.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__("cuda", index)
        self._others_at_start: int | None = None
        self._context_at_start = 0
        self._number = os.getpid()  # this process, as the driver's library numbers it
        self._budget: int | None = None
        self._fraction = 1.0  # the allocator's share of the memory before there was a budget
        self._limit_set = False  # whether the limit is that of the context as it is after the warm-up
        self._failed_before = 0

    @staticmethod
    def count() -> int:
        """GPUs that this process may use, without initialising CUDA where the driver's library can be asked."""
        return torch.cuda.device_count()

    @staticmethod
    def absence() -> str:
        """Why there is none, for people."""
        if torch.version.cuda is None and torch.version.hip is None:
            return f"this PyTorch ({torch.__version__}) is built without CUDA"
        return "PyTorch sees no NVIDIA GPU (no driver, or CUDA_VISIBLE_DEVICES hides it)"

    def identity(self) -> str:
        """The UUID of the GPU, or of the part of it that this process may use."""
        with suppress(RuntimeError, IndexError, TypeError, AttributeError):
            if torch.cuda.is_initialized():
                return str(torch.cuda.get_device_properties(self.index).uuid)
            # asked of the driver, since there is no public function that opens no context; None without its library
            return torch.cuda._raw_device_uuid_nvml()[torch.cuda._get_nvml_device_index(self.index)].removeprefix(
                "GPU-"
            )
        return super().identity()

    def capacity(self) -> int:
        """All memory of the GPU in bytes. Opens a context only where the driver's library cannot be asked."""
        if not torch.cuda.is_initialized():
            total = nvml.total_bytes(self.index)
            if total is not None:
                return total
        return self._free_and_total()[1]

    def used_by_others(self) -> int:
        """Bytes that other processes hold on the GPU."""
        used = nvml.used_bytes(self.index)
        if used is not None and not torch.cuda.is_initialized():
            return used
        return max(0, (self._used() if used is None else used) - self._held())

    def context_bytes(self) -> int:
        """What this process holds on the GPU outside of PyTorch's allocator. Opens a context.

        Where the driver does not tell what this process holds, it is what there is more than before it began; growth
        beyond what libraries can take is another process's. Where that is not known either, everything that PyTorch did
        not reserve counts as context, which errs on the safe side.
        """
        self._open()
        return max(0, self._held() - torch.cuda.memory_reserved(self.torch_device))

    def out_of_memory(self, error: BaseException) -> bool:
        """PyTorch's own error, or a library's that could not allocate outside of it or hid that it could not.

        A MemoryError is the host's.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return True
        if not isinstance(error, RuntimeError):
            return False
        if _NO_WAY in str(error):
            return self._failed_allocations() > self._failed_before
        return any(text in str(error) for text in _OUT_OF_MEMORY)

    def _failed_allocations(self) -> int:
        """Requests that the allocator could not meet so far, also those whose error a library has caught."""
        return torch.cuda.memory_stats(self.torch_device).get("num_ooms", 0) if torch.cuda.is_initialized() else 0

    def release(self) -> None:
        """Collect garbage, give cached memory back and reset peaks. Opens no context."""
        self._failed_before = self._failed_allocations()
        self._limit_set = False
        super().release()

    def measure_peak(self, fn: Callable[[], None], resident: int) -> Peak:
        """As for any accelerator, within the limit as it is after the warm-up."""
        self._set_limit()
        return super().measure_peak(fn, resident)

    def time(self, fn: Callable[[], None]) -> float:
        """As for any accelerator, within the limit as it is after the warm-up."""
        self._set_limit()
        return super().time(fn)

    @contextmanager
    def limit(self, budget_bytes: int | None) -> Iterator[None]:
        """Let the allocator reserve no more than the budget less the context; the former limit is put back after.

        Raises DeviceOutOfMemory where the context alone is over the budget.
        """
        if budget_bytes is None:
            yield
            return
        context = self.context_bytes()
        if budget_bytes <= context:
            raise DeviceOutOfMemory(
                f"the budget of {format_bytes(budget_bytes)} is not more than what the CUDA context alone takes, "
                f"{format_bytes(context)}",
                remedy="Raise the budget.",
            )
        outside = self._budget, self._fraction
        self._budget, self._limit_set = budget_bytes, False
        self._fraction = before = torch.cuda.memory.get_per_process_memory_fraction(self.torch_device)
        self._keep_within(budget_bytes - context)
        try:
            yield
        finally:
            self._budget, self._fraction = outside
            torch.cuda.memory.set_per_process_memory_fraction(before, self.torch_device)

    def _set_limit(self) -> None:
        """Where a budget holds, the allocator gets what the context leaves of it now that kernels have been loaded."""
        if self._budget is not None and not self._limit_set:
            self._limit_set = True
            room = max(0, self._budget - self.context_bytes())
            self._keep_within(room)
            if torch.cuda.memory_reserved(self.torch_device) > room:
                torch.cuda.empty_cache()  # what it keeps is more than it may have by now

    def _keep_within(self, nbytes: int) -> None:
        share = nbytes / self._free_and_total()[1]
        torch.cuda.memory.set_per_process_memory_fraction(min(self._fraction, share), self.torch_device)

    def _open(self) -> None:
        """Open the context, noting first what others hold: afterwards the two cannot be told apart."""
        if not torch.cuda.is_initialized():
            self._others_at_start, before = nvml.used_bytes(self.index), nvml.processes(self.index)
            torch.cuda.init()
            self._load_libraries()
            came = set(nvml.processes(self.index) or ()) - set(before or ())
            if before is not None and len(came) == 1:  # in a container it may have the host's number
                self._number = came.pop()
            if self._others_at_start is not None:
                self._context_at_start = max(0, self._beside_others() - torch.cuda.memory_reserved(self.torch_device))

    def _load_libraries(self) -> None:
        """Every step multiplies matrices: with the library for it loaded, the context is near its full size.

        At a process's first product PyTorch looks once whether cuBLAS' workspace is one that it calls deterministic;
        strict comparisons of gradients are refused for ever if not. From Hopper on that one has the usual size; ROCm,
        which looks at the same variable, has others.
        """
        if torch.version.hip is None and torch.cuda.get_device_capability(self.torch_device) >= (9, 0):
            os.environ.setdefault(WORKSPACE, DETERMINISTIC)
        square = torch.ones(16, 16, device=self.torch_device)
        torch.mm(square, square)
        self.synchronize()

    def _held(self) -> int:
        """Bytes that this process holds on the GPU, as well as that can be known."""
        own = (nvml.processes(self.index) or {}).get(self._number)
        if own is not None:
            return own
        if self._others_at_start is None:
            return self._used()
        reserved, least = torch.cuda.memory_reserved(self.torch_device), self._context_at_start
        return reserved + min(max(self._beside_others() - reserved, least), least + _MOST_LOADED)

    def _beside_others(self) -> int:
        """What is used now beyond what others held when this process began."""
        assert self._others_at_start is not None
        # both ends by the same source: what the driver's library calls used has the driver's own part in it, what CUDA
        # calls used has not, and the difference of the two can be as large as a context
        now = nvml.used_bytes(self.index)
        return (self._used() if now is None else now) - self._others_at_start

    def _used(self) -> int:
        """Bytes in use on the GPU, as CUDA counts them."""
        free, total = self._free_and_total()
        return total - free

    def _free_and_total(self) -> tuple[int, int]:
        self._open()
        return torch.cuda.mem_get_info(self.torch_device)
