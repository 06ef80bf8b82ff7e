"""What bitsandbytes' kernels return, compute and take from the allocator where recording cannot see it.

Its operators are opaque: ``gemm_4bit`` dequantises the whole weight, multiplies, and frees it again within one op.
Rules are read off the sources of bitsandbytes 0.50 (``backends/default/ops.py`` and ``backends/cuda/ops.py``). Those of
CPUs are checked against real steps; those of CUDA have not been run on a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from autockpt.interpreter import patched
from autockpt.tracing.kernels.operators import Argument

CUDA_FIGURES = (
    "What bitsandbytes' CUDA kernels allocate is read off its sources, not measured: a dequantised copy of the weight "
    "in every product, and its block maxima in fp32."
)
NO_OUTLIERS = "LLM.int8: no activation is taken to be an outlier, whose columns would be multiplied in 16 bits as well."
_FLOAT, _HALF = 4, 2


def cpu_quantised(argument: Argument, threads: int) -> int:
    """Bytes beyond inputs and outputs of ``gemm_4bit`` on a CPU: the weight whole, and its maxima in fp32."""
    tables = _maxima(argument)
    return max(2 * tables, tables + _dequantised(argument))  # the maxima before their offset is added, and after


def _gemm_4bit(argument: Argument) -> int:
    """The weight whole, and its maxima before and after their offset is added.

    Products of up to 1536 rows may take a kernel that dequantises as it goes, by tables for each generation: the copy
    is counted for them, too.
    """
    return 2 * _maxima(argument) + _dequantised(argument)


def _int8_quantise(argument: Argument) -> int:
    """Magnitudes, and where they are large."""
    return argument("A").numel() * (_HALF + 1) if argument("threshold") else 0


CUDA_RULES: dict[str, Callable[[Argument], int]] = {
    "gemm_4bit": _gemm_4bit,
    "int8_vectorwise_quant": _int8_quantise,
    "int8_mixed_scaled_mm": lambda of: _sums(of("CA"), of("CB"), of("A").dtype),
    "int8_scaled_mm": lambda of: _sums(of("A"), of("B"), of("dtype")),
}
"""Bytes beyond inputs and outputs of bitsandbytes' CUDA kernels, by operator."""


def _sums(x: Tensor, weight: Tensor, wanted: torch.dtype | None) -> int:
    """Products add up in int32, and are scaled to fp16 before they become another type."""
    numbers = x.numel() // x.size(-1) * weight.size(0)
    return numbers * (_FLOAT + (0 if wanted in (None, torch.float16) else _HALF))


def _maxima(argument: Argument) -> int:
    """Bytes of the dequantised block maxima; 0 where they are not quantised themselves."""
    coded = argument("absmax_8bit")
    return 0 if coded is None else coded.numel() * _FLOAT


def _dequantised(argument: Argument) -> int:
    return prod(argument("shapeB")) * argument("A").element_size()


def notes_on_quantised(operators: Iterable[str]) -> Iterator[str]:
    """What people should know about a step on CUDA that ran these operators."""
    ran = {name.split(".")[1] for name in operators if name.startswith("bitsandbytes.")}
    if ran:
        yield CUDA_FIGURES
    if "int8_mixed_scaled_mm" in ran:
        yield NO_OUTLIERS


@contextmanager
def cuda_int8_products() -> Iterator[None]:
    """Let 8-bit layers on CPU ghosts take the autograd function that they take on CUDA, and stay where they are.

    What moves them "back to the CPU" (PEFT's DoRA does) would leave them without their scales.
    """
    package: Any = sys.modules.get("bitsandbytes")
    if not hasattr(package, "matmul"):
        yield
        return
    from bitsandbytes.autograd._functions import MatMul8bitLt  # type: ignore[import-not-found]

    def matmul(
        A: Tensor, B: Tensor, out: Any = None, state: Any = None, threshold: float = 0.0, bias: Tensor | None = None
    ) -> Tensor:
        if threshold > 0.0:
            state.threshold = threshold
        return MatMul8bitLt.apply(A, B, out, bias, state)  # type: ignore[return-value]

    weights = package.nn.Int8Params
    moving = weights.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        parse: Any = torch._C._nn._parse_to  # type: ignore[attr-defined]
        device, dtype, *_ = parse(*args, **kwargs)
        stays = self.data.dtype is torch.int8 and dtype is None and device == self.device
        return self if stays else moving(self, *args, **kwargs)

    with patched(package, "matmul", matmul), patched(weights, "to", to):
        yield
