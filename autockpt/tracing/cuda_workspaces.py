"""Memory that CUDA kernels take from PyTorch's allocator and give back before they return.

Read off the sources of torch 2.11 to 2.13; not measured on a device yet. Not here: what cuDNN takes for convolutions
(its heuristics decide), and scratch pads of sorts and scans of a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autockpt.tracing.operators import Operator
from autockpt.tracing.quantised_kernels import CUDA_RULES

_FLOAT, _LONG = 4, 8
_ROWS_PER_THREAD = 10
_FEW_INDICES = 3072


def cuda_workspace_bytes(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes beyond inputs and outputs that the CUDA kernel holds at its worst moment; 0 where none are known of."""
    rule = _RULES.get(operator.base)
    if rule is None:
        return 0

    def argument(name: str) -> Any:
        return operator.argument(name, args, kwargs)

    return max(rule(argument), 0)


_Argument = Callable[[str], Any]


def _flash_backward(argument: _Argument) -> int:
    """fp32 sums of the queries' gradient and of the rows, and gradients per query head where heads are shared.

    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``mha_bwd``.
    """
    query, key = argument("query"), argument("key")
    batch, heads, length, head = query.shape
    rows = _up(length, 128)
    padded = _up(head, 32 if head <= 128 else 64)
    nbytes = batch * heads * rows * (padded + 1) * _FLOAT
    if key.size(1) != heads:
        nbytes += 2 * batch * heads * key.size(2) * head * query.element_size()
    return nbytes


def _efficient_backward(argument: _Argument) -> int:
    """Row sums, and fp32 sums of the queries' gradient for 16-bit types.

    ``mem_eff_attention/kernel_backward.h``: ``workspace_elements_gq`` and ``delta``.
    """
    query = argument("query")
    batch, heads, length, head = query.shape
    nbytes = batch * heads * _up(length, 32) * _FLOAT
    if query.element_size() < _FLOAT:
        nbytes += batch * heads * _up(length, 64) * _up(head, 64) * _FLOAT
    return nbytes


def _cudnn_backward(argument: _Argument) -> int:
    """cuDNN's own plan decides; the fp32 sums that it cannot do without are counted."""
    query = argument("query")
    batch, heads, length, head = query.shape
    return batch * heads * _up(length, 128) * (_up(head, 32) + 1) * _FLOAT


def _embedding_backward(argument: _Argument) -> int:
    """Sorted indices and their places, and fp32 partial sums of each run of equal tokens.

    ``EmbeddingBackwardKernel.cu``; how many runs there are depends on the tokens, so this is the most there can be.
    """
    grad, indices, rows = argument("grad_output"), argument("indices"), argument("num_weights")
    count = indices.numel()
    copied = 0 if grad.is_contiguous() else grad.numel() * grad.element_size()
    if count <= _FEW_INDICES:
        return copied
    runs = min(count, int(rows)) + -(-count // _ROWS_PER_THREAD)
    return copied + 4 * count * _LONG + runs * grad.size(-1) * _FLOAT


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_RULES: dict[str, Callable[[_Argument], int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "embedding_dense_backward": _embedding_backward,
    **CUDA_RULES,
}
