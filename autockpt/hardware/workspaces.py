"""Memory that a CPU's kernels take from PyTorch's allocator and give back before they return.

Recording sees what goes into an op and what comes out. Rules stand here only for kernels that nearly every model runs:
attention, norms, copies of what is not contiguous or of another type. They are ATen's own and hold on every CPU. Rarer
kernels are tried out (``scratch.py``). A search on a CPU measures its candidates in any case, so predicted peaks within
0.5 % are enough. Accelerators have ``accelerator_workspaces.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from autockpt.hardware.operators import Argument, Operator, channels_last
from autockpt.hardware.quantised_kernels import cpu_quantised

_CONDITIONS = frozenset({"condition", "mask"})
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def workspace_bytes(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], threads: int = 1) -> int:
    """Bytes beyond inputs and outputs that the CPU kernel holds at its worst moment; 0 where none are known of."""
    rule = _RULES.get(operator.base)
    if rule is None:
        return _converted_operands(operator, args, kwargs) if operator.pointwise else 0
    return max(rule(operator.arguments(args, kwargs), threads), 0)


def _convolution(argument: Argument, threads: int) -> int:
    """About what oneDNN's blocked copies take, of convolutions that are too large to try out."""
    x, other = argument("input"), argument("grad_output")
    return x.nbytes + (argument("weight") if other is None else other).nbytes


def _batch_norm_backward(argument: Argument, threads: int) -> int:
    """The input's gradient is allocated twice, unless one has channels last and the other not."""
    x, grad, mask = argument("input"), argument("grad_out"), argument("output_mask")
    if channels_last(x) != channels_last(grad):
        return 2 * x.nbytes if channels_last(x) and x.dtype in _SIXTEEN_BIT else 0  # computed in fp32
    return x.nbytes if mask is None or mask[0] else 0


def _contiguous_copies(*names: str) -> Callable[[Argument, int], int]:
    """The kernel copies these inputs where they are not contiguous."""

    def rule(argument: Argument, threads: int) -> int:
        tensors = [argument(name) for name in names]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor) and not t.is_contiguous())

    return rule


def _layer_norm_backward(argument: Argument, threads: int) -> int:
    """Sums of the parameters' gradients per thread (``cpu/layer_norm_kernel.cpp``), and contiguous copies."""
    x, mask = argument("input"), argument("output_mask")
    sums = 0
    if mask is None or mask[1] or mask[2]:
        sums = 2 * threads * math.prod(argument("normalized_shape")) * x.element_size()
    return _contiguous_copies("input", "grad_out")(argument, threads) + sums


def _attention(argument: Argument, threads: int) -> int:
    """Blocks of scores and results per thread: ``cpu/FlashAttentionKernel.cpp``, ``cpu_flash_attention``."""
    query = argument("query")
    rows, keys, item = *_attention_blocks(query, argument("key")), query.element_size()
    numbers = rows * (keys + 2 + query.size(-1))
    return threads * (numbers * max(item, 4) + (rows * keys * item if item == 2 else 0))


def _attention_backward(argument: Argument, threads: int) -> int:
    """Likewise, ``cpu_flash_attention_backward``; and the gradient that comes in with heads inside."""
    query, grad = argument("query"), argument("grad_out")
    rows, keys, item = *_attention_blocks(query, argument("key")), query.element_size()
    nbytes = threads * ((2 * keys + 1) * rows * max(item, 4) + (2 * rows * keys * item if item == 2 else 0))
    return nbytes + (0 if grad.transpose(1, 2).is_contiguous() else grad.nbytes)


def _attention_blocks(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Queries and keys of a block."""
    length = query.size(2)
    return min(256 if length >= 768 else 64 if length >= 192 else 32, length), min(512, key.size(2))


def _converted_operands(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Operands of another type than the common one are copied before elementwise kernels run on a CPU.

    ``aten/src/ATen/TensorIterator.cpp``, ``compute_types``; in place, the result is computed in a temporary too.
    """
    values = {name: operator.argument(name, args, kwargs) for name in operator.positions}
    operands = [v for name, v in values.items() if isinstance(v, Tensor) and name not in _CONDITIONS]
    return _converted(operands, operands[0] if operator.mutates else None)


def _converted(operands: list[Tensor], written: Tensor | None = None) -> int:
    """Bytes of operands in the type they have in common, where that is not their own."""
    if len({t.dtype for t in operands}) < 2:
        return 0
    # the type that elementwise kernels compute in; tensors without dimensions count less
    _, common = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    nbytes = sum(t.numel() * common.itemsize for t in operands if t.dim() and t.dtype is not common)
    if written is not None and written.dtype is not common:
        nbytes += written.numel() * common.itemsize
    return nbytes


_RULES: dict[str, Callable[[Argument, int], int]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution,
    "native_batch_norm_backward": _batch_norm_backward,
    "native_layer_norm": _contiguous_copies("input"),
    "native_layer_norm_backward": _layer_norm_backward,
    "_softmax": _contiguous_copies("self"),
    "_log_softmax": _contiguous_copies("self"),
    "_softmax_backward_data": _contiguous_copies("grad_output", "output"),
    "_log_softmax_backward_data": _contiguous_copies("grad_output", "output"),
    "nll_loss_forward": _contiguous_copies("self", "weight"),
    "embedding_dense_backward": _contiguous_copies("grad_output"),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "gemm_4bit": cpu_quantised,
}
