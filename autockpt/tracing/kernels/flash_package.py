"""FlashAttention's own packages where a step is simulated: their calls become PyTorch's flash kernel on ghosts.

transformers' ``flash_attention_2``, ``_3`` and ``_4`` call kernels that need the package and a GPU. PyTorch's own flash
kernel is FlashAttention 2: it saves the same (queries, keys, values, output, log-sum-exp). Sequences with padding are
gathered into copies before the kernel and scattered after it (``transformers/modeling_flash_attention_utils.py``): the
copies are counted as if no token were padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autockpt.errors import WorkloadError
from autockpt.interpreter import patched
from autockpt.tracing.kernels.cuda_kernels import AMPERE, Capability

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
NOTE = "{} is simulated by PyTorch's flash kernel, which keeps the same; windows and sinks change no byte."


@contextmanager
def flash_on_ghosts(capability: Capability = AMPERE) -> Iterator[None]:
    """Let transformers' models that ask for FlashAttention be built without its package and run on ghosts.

    Raises WorkloadError for a GPU that is older than FlashAttention's first.
    """
    from transformers import PreTrainedModel
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if capability < AMPERE:
        raise WorkloadError(
            f"FlashAttention does not run on compute capability {capability[0]}.{capability[1]}",
            remedy="Set `attn: sdpa`, which takes the memory-efficient kernel there.",
        )
    owner: Any = PreTrainedModel
    plain = owner._check_and_adjust_attn_implementation

    def adjusted(model: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation in FLASH:
            if not model._supports_flash_attn:
                raise ValueError(f"{type(model).__name__} does not support attn_implementation {attn_implementation}")
            return attn_implementation
        return plain(model, attn_implementation, *args, **kwargs)

    functions: Any = ALL_ATTENTION_FUNCTIONS
    before = {name: functions[name] for name in FLASH if name in functions}
    for name in FLASH:
        functions.register(name, _flash)
    try:
        with patched(owner, "_check_and_adjust_attn_implementation", adjusted):
            yield
    finally:
        for name, function in before.items():
            functions.register(name, function)


def _flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """transformers' own call of PyTorch's attention, without a mask: heads before positions in, after them out."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is not None:
        query, key, value = (_gathered(t) for t in (query, key, value))
    output, _ = sdpa_attention_forward(module, query, key, value, None, dropout, scaling, is_causal)
    return output if attention_mask is None else output.clone(), None


def _gathered(tensor: Tensor) -> Tensor:
    """A copy with positions before heads, as sequences without their padding are."""
    return tensor.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
