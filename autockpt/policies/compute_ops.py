"""Which ops are worth keeping, and worth counting: matrix products, convolutions and attentions."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.flop_counter import flop_registry


@functools.cache
def is_heavy(func: Any) -> bool:
    """Whether an op's cost lies in arithmetic: those whose floating-point operations PyTorch counts, attentions, and
    bitsandbytes' products with quantised weights."""
    if getattr(func, "overloadpacket", None) in flop_registry or is_attention(func):
        return True
    return str(func).startswith(("bitsandbytes.gemm_4bit", "bitsandbytes.int8_mixed_scaled_mm"))


@functools.cache
def is_attention(func: Any) -> bool:
    """Whether an op is a fused attention's forward or backward, PyTorch's own or a library's."""
    name = str(func)
    return "scaled_dot_product" in name or "flash_attn" in name or "_attention_forward" in name


def draws_random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call uses dropout. Left out when its forward runs again, it would shift all later random numbers."""
    if (found := _dropout(func)) is None:
        return False
    position, default = found
    return bool(kwargs.get("dropout_p", args[position] if position < len(args) else default))


@functools.cache
def _dropout(func: Any) -> tuple[int, Any] | None:
    """Where an op takes its dropout, and what it is by itself; None without any. Asking a schema takes as long as
    running a small op."""
    schema = getattr(func, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            return position, argument.default_value
    return None
