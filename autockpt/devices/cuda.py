"""NVIDIA GPUs: what the caching allocator does not count, and libraries that hide that memory ran out."""

from __future__ import annotations

import os

import torch

from autockpt.devices.accelerator import AcceleratorDevice, without_context

# The variable that cuBLAS' workspace is chosen by, and a value that PyTorch calls deterministic.
WORKSPACE, DETERMINISTIC = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_OUT_OF_MEMORY = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # what making a handle says where there is no room for it
    "CUDNN_STATUS_ALLOC_FAILED",
)
# What a convolution says where none of cuDNN's ways could be taken: for want of memory, or for another reason.
_NO_WAY = "unable to find an engine to execute this computation"
MOST_CONTEXT = 2 << 30
"""More than a process holds outside of the allocator: CUDA itself, its libraries, loaded kernels, NCCL's buffers."""


class CudaDevice(AcceleratorDevice):
    """One GPU: an accelerator of which PyTorch also knows what lies outside of its allocator.

    Nothing touches CUDA before a method that has to. A budget covers reserved memory plus the *context*: what this
    process holds on the GPU besides. CUDA counts it together with the memory of other processes, so all that PyTorch
    did not reserve counts as context, up to what a context can be; that is exact where nobody else uses the GPU, and
    errs on the safe side elsewhere. With ``expandable_segments:True`` the allocator reserves less for the same tensors,
    and the limit holds likewise: plan with the same allocator settings as you train with.
    """

    def __init__(self, index: int = 0) -> None:
        super().__init__("cuda", index)
        self._failed_before = 0

    def identity(self) -> str:
        """The UUID of the GPU, or of the part of it that this process may use."""
        uuid = without_context("cuda", lambda: str(torch.cuda.get_device_properties(self.index).uuid))
        return uuid or super().identity()

    def used_by_others(self) -> int:
        """Bytes that other processes hold on the GPU, less those that count as this one's context."""
        return super().used_by_others() - self.context_bytes()

    def context_bytes(self) -> int:
        """What this process holds on the GPU outside of PyTorch's allocator; it grows while kernels are loaded."""
        return min(super().used_by_others(), MOST_CONTEXT)

    def out_of_memory(self, error: BaseException) -> bool:
        """PyTorch's own error, or a library's that could not allocate outside of it or hid that it could not.

        A MemoryError is the host's.
        """
        if isinstance(error, RuntimeError) and _NO_WAY in str(error):
            return self._failed_allocations() > self._failed_before
        said = isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)
        return said or isinstance(error, torch.OutOfMemoryError)

    def _failed_allocations(self) -> int:
        """Requests that the allocator could not meet so far, also those whose error a library has caught."""
        return torch.cuda.memory_stats(self.torch_device).get("num_ooms", 0) if torch.cuda.is_initialized() else 0

    def release(self) -> None:
        """Collect garbage, give cached memory back and reset peaks. Opens no context."""
        self._failed_before = self._failed_allocations()
        super().release()

    def _open(self) -> None:
        """Open the context, near its full size: every step multiplies matrices, by a library that this loads.

        At a process's first product PyTorch looks once whether cuBLAS' workspace is one that it calls deterministic;
        strict comparisons of gradients are refused for ever if not. From Hopper on that one has the usual size; ROCm,
        which looks at the same variable, has others.
        """
        if torch.cuda.is_initialized():
            return
        if torch.version.hip is None and torch.cuda.get_device_capability(self.torch_device) >= (9, 0):
            os.environ.setdefault(WORKSPACE, DETERMINISTIC)
        square = torch.ones(16, 16, device=self.torch_device)
        torch.mm(square, square)
        self.synchronize()

    def _free_and_total(self) -> tuple[int, int]:
        self._open()
        return torch.cuda.mem_get_info(self.torch_device)
