"""Triton's kernels in a ghost run: none is launched, and what the Python around them allocates and saves is recorded.

So packages of such kernels (Liger Kernel) need no table of what each keeps: their own code says it, of the version that
is installed. A launch is recorded as one op that reads or writes each tensor it is given once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from autockpt.interpreter import patched

LAUNCH = "triton_kernel"
NOTE = (
    "Kernels of Triton's are not launched in ghost runs: bytes are those that the Python around them allocates, "
    "seconds those of one pass over their tensors."
)
_FUSED_LOSS = "liger_kernel.ops.fused_linear_cross_entropy"
_HALF = (torch.float16, torch.bfloat16)


@contextmanager
def no_launches() -> Iterator[None]:
    """Record launches of Triton's kernels, those that would try settings out first among them, and do nothing else."""

    def record(kernel: Any, *args: Any, **kwargs: Any) -> None:
        record_launch(*args, *kwargs.values())

    places = ("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")
    with ExitStack() as stack:
        for module, name in places:
            if (kind := getattr(sys.modules.get(module), name, None)) is not None:
                stack.enter_context(patched(kind, "run", record))
        yield


@contextmanager
def fused_loss_on_cuda() -> Iterator[None]:
    """Let Liger's fused linear cross-entropy take its path for CUDA of capability 8.0 or newer on ghosts on the CPU.

    Its forward and backward (liger_kernel/ops/fused_linear_cross_entropy.py of 0.8) write products into buffers there,
    for weights and activations in one 16-bit type; other calls stay as they are, on what it calls its legacy path, with
    a copy of the head's gradient in fp32 for each chunk.
    """
    package: Any = sys.modules.get(_FUSED_LOSS)
    if package is None:
        yield
        return
    forward, backward = "fused_linear_cross_entropy_forward", "fused_linear_cross_entropy_backward"
    ours = functools.partial(_forward, getattr(package, forward))
    with patched(package, forward, ours), patched(package, backward, lambda _, *gradients: gradients):
        yield


def _forward(plain: Callable[..., Any], _input: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
    usual = {"lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean", "chunk_mem_const": 1}
    given = ("bias", "softcap", "ignore_index", *usual)
    odd = any(value not in (None, False) for name, value in options.items() if name not in given)
    odd |= any(options.get(name, value) != value for name, value in usual.items() if name != "reduction")
    bias = options.get("bias")
    if odd or bias is not None or not _input.dtype == weight.dtype in _HALF or torch.is_autocast_enabled("cpu"):
        return plain(_input=_input, weight=weight, target=target, **options)
    rows, hidden = _input.shape
    vocabulary = weight.size(0)
    chunk = -(-rows // -(-vocabulary // hidden))
    chunk = min(1 << (chunk - 1).bit_length(), rows)
    grad_input = torch.zeros_like(_input)
    grad_weight = torch.zeros_like(weight) if _input.requires_grad and weight.requires_grad else None
    losses = torch.zeros(rows, dtype=torch.float32)
    buffer = torch.empty((chunk, vocabulary), dtype=_input.dtype)
    for start in range(0, rows, chunk):
        piece = _input[start : start + chunk]
        logits = buffer[: piece.size(0)]
        torch.mm(piece, weight.t(), out=logits)
        record_launch(logits, logits, target[start : start + chunk], losses[start : start + chunk])
        if _input.requires_grad:
            torch.mm(logits, weight, out=grad_input[start : start + chunk])
        if grad_weight is not None:
            torch.addmm(grad_weight, logits.t(), piece, out=grad_weight)
    del buffer, logits
    return losses.sum(), None, None, None, grad_input, grad_weight, None


def record_launch(*given: Any) -> None:
    tensors = [value for value in given if isinstance(value, Tensor)]
    if tensors:
        _operator()(tensors)


@functools.cache
def _operator() -> Any:
    _library.define(f"{LAUNCH}(Tensor(a!)[] tensors) -> ()")
    return getattr(torch.ops.autockpt, LAUNCH).default


_library = torch.library.Library("autockpt", "FRAGMENT")
