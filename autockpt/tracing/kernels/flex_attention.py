"""PyTorch's ``flex_attention`` where a GPU's step is simulated: its calls become the flash kernel on ghosts.

On a CPU it has no backward, and which blocks its mask leaves out depends on values, which ghosts do not have. It saves
what the flash kernel saves: queries, keys, values, output, log-sum-exp (``FlexAttentionAutogradOp`` in
``torch/_higher_order_ops/flex_attention.py`` of torch 2.11 to 2.13), besides what functions of scores and masks read.
With a mask, and as many queries as keys, half of the blocks are taken to be computed, as under a causal one. Masks are
made by compiled code, which does not write them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as package

from autockpt.interpreter import patched
from autockpt.tracing.kernels.workspaces import up_to

FLEX = "flex_attention"
_ALIGNMENT = 8  # head sizes are padded to it for the flash kernel
_WHOLE = 1 << 30  # rows of a block where there is no mask


@contextmanager
def flex_on_cuda() -> Iterator[None]:
    """Let ``flex_attention`` and ``create_block_mask``, compiled or not, run on ghosts on the CPU as on a GPU."""
    with ExitStack() as stack:
        stack.enter_context(patched(package, "_validate_device", lambda *_: None))
        stack.enter_context(patched(package, "flex_attention_hop", _attention))
        stack.enter_context(patched(package, "create_mask", _unwritten_mask))
        stack.enter_context(patched(package, "_convert_mask_to_block_mask", _blocks))
        yield


def _attention(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``given``: what changes the scores, the blocks of the mask, the scale, options of the kernel."""
    _, blocks, scale, *_ = given
    head = value.size(-1)
    even = up_to(max(query.size(-1), head), _ALIGNMENT)
    padded = [F.pad(t, (0, even - t.size(-1))) if t.size(-1) < even else t for t in (query, key, value)]
    output, sums = _OnGhosts.apply(*padded, scale, query.size(2) == key.size(2) and blocks[-3] < _WHOLE)  # type: ignore[misc]
    return output[..., :head], sums, sums


class _OnGhosts(torch.autograd.Function):
    """A function of its own, as compiled code is one: choices that look at single ops refuse both."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention.default
        output, sums, _, _, rows, columns, seed, offset, _ = kernel(query, key, value, 0.0, causal, False, scale=scale)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.more, ctx.scale = (None, None, rows, columns, 0.0, causal, seed, offset), scale
        ctx.mark_non_differentiable(sums)
        return output, sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        return *kernel(gradient, *ctx.saved_tensors, *ctx.more, scale=ctx.scale), None, None


def _unwritten_mask(mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, device: Any = None) -> Tensor:
    return torch.zeros((), dtype=torch.bool, device=device).expand(B or 1, H or 1, Q_LEN, KV_LEN)


def _blocks(
    mask: Tensor, Q_BLOCK_SIZE: int = 128, KV_BLOCK_SIZE: int = 128, separate_full_blocks: bool = False
) -> tuple[Tensor, Tensor | None]:
    *outer, rows, columns = mask.shape
    partial = mask.new_zeros((*outer, -(-rows // Q_BLOCK_SIZE), -(-columns // KV_BLOCK_SIZE)), dtype=torch.int8)
    return partial, torch.zeros_like(partial) if separate_full_blocks else None
