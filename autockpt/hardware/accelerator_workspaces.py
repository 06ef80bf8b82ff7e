"""Memory that kernels of CUDA and other accelerators take and give back before they return; see ``workspaces.py``.

The rules were read off the sources of torch 2.11 to 2.13; not measured on a device yet. Not among them: what cuDNN
takes for convolutions (its heuristics decide), and scratch pads of sorts and scans of a few kilobytes. Other devices
have other kernels: there only what ops hold that are put together from others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from autockpt.hardware.operators import Argument, Operator
from autockpt.hardware.quantised_kernels import CUDA_RULES

_ROWS_PER_THREAD = 10
_FEW_INDICES = 3072
FLOAT, LONG = 4, 8
NO_REDUCTION = 0  # at::Reduction


def accelerator_workspace_bytes(
    operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], cuda: bool = True
) -> int:
    """Bytes beyond inputs and outputs that the kernel of CUDA, or of another accelerator, holds at its worst moment.

    0 where none are known of.
    """
    argument = operator.arguments(args, kwargs)
    rule = _PUT_TOGETHER.get(operator.base) or (_CUDA_RULES.get(operator.base) if cuda else None)
    return 0 if rule is None else max(rule(argument), 0)


def _rows_without_any(argument: Argument) -> int:
    """Of ``_safe_softmax``, whose mask of the rows themselves is a block by itself, and a small one."""
    return argument("self").numel()


def _loss_tensors(reduced: int, unreduced: int = 0) -> Callable[[Argument], int]:
    """Elementwise losses hold so many tensors as large as their input where they reduce it, and where they do not."""

    def rule(argument: Argument) -> int:
        x, target = argument("self"), argument("target")
        count = math.prod(torch.broadcast_shapes(x.size(), target.size()))
        held = unreduced if argument("reduction") == NO_REDUCTION else reduced
        return held * count * torch.promote_types(x.dtype, target.dtype).itemsize

    return rule


def _flash_backward(argument: Argument) -> int:
    """fp32 sums of the queries' gradient and of the rows, and gradients per query head where heads are shared.

    ``aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp``, ``mha_bwd``.
    """
    query, key = argument("query"), argument("key")
    batch, heads, length, head = query.shape
    rows = up_to(length, 128)
    padded = up_to(head, 32 if head <= 128 else 64)
    nbytes = batch * heads * rows * (padded + 1) * FLOAT
    if key.size(1) != heads:
        nbytes += 2 * batch * heads * key.size(2) * head * query.element_size()
    return nbytes


def _efficient_backward(argument: Argument) -> int:
    """Row sums, and fp32 sums of the queries' gradient for 16-bit types.

    ``mem_eff_attention/kernel_backward.h``: ``workspace_elements_gq`` and ``delta``.
    """
    query = argument("query")
    batch, heads, length, head = query.shape
    nbytes = batch * heads * up_to(length, 32) * FLOAT
    if query.element_size() < FLOAT:
        nbytes += batch * heads * up_to(length, 64) * up_to(head, 64) * FLOAT
    return nbytes


def _cudnn_backward(argument: Argument) -> int:
    """cuDNN's own plan decides; the fp32 sums that it cannot do without are counted."""
    query = argument("query")
    batch, heads, length, head = query.shape
    return batch * heads * up_to(length, 128) * (up_to(head, 32) + 1) * FLOAT


def _embedding_backward(argument: Argument) -> int:
    """Sorted indices and their places, and fp32 partial sums of each run of equal tokens.

    ``EmbeddingBackwardKernel.cu``; how many runs there are depends on the tokens, so this is the most there can be.
    """
    grad, indices, rows = argument("grad_output"), argument("indices"), argument("num_weights")
    count = indices.numel()
    copied = 0 if grad.is_contiguous() else grad.nbytes
    if count <= _FEW_INDICES:
        return copied
    runs = min(count, int(rows)) + -(-count // _ROWS_PER_THREAD)
    return copied + 4 * count * LONG + runs * grad.size(-1) * FLOAT


def _soft_margin_backward(argument: Argument) -> int:
    """Put together from elementwise ops (``native/Loss.cpp``)."""
    return 2 * argument("self").nbytes


def _logsumexp(argument: Argument) -> int:
    """Exponentials, and the maxima beside the result (``native/ReduceOps.cpp``)."""
    x = argument("self")
    reduced = math.prod(x.size(dim) for dim in argument("dim")) if x.dim() else 1
    return x.nbytes + x.nbytes // max(reduced, 1)


def _distances(argument: Argument) -> int:
    """One product gives them, of copies with two more columns."""
    points, others = argument("x1"), argument("x2")
    return sum(x.nbytes // max(x.size(-1), 1) * (x.size(-1) + 2) for x in (points, others))


def up_to(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


# from the same ops on every device
_PUT_TOGETHER: dict[str, Callable[[Argument], int]] = {
    "_safe_softmax": _rows_without_any,
    "binary_cross_entropy_with_logits": _loss_tensors(2, 1),
    "soft_margin_loss_backward": _soft_margin_backward,
    "logsumexp": _logsumexp,
}
_CUDA_RULES: dict[str, Callable[[Argument], int]] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "embedding_dense_backward": _embedding_backward,
    "mse_loss": _loss_tensors(1),
    "smooth_l1_loss": _loss_tensors(1),
    "huber_loss": _loss_tensors(1),
    "_euclidean_dist": _distances,
    **CUDA_RULES,
}
