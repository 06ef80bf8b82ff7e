"""The kernels that a step takes on CUDA where a CPU takes others, so that a ghost run saves what CUDA saves.

A CPU-only PyTorch cannot make CUDA tensors (fake ones abort the process in attention's backward), but its dispatcher
knows CUDA's operators: called on ghosts they build their real autograd nodes, and no kernel runs. Which attention
kernel is chosen follows ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` (``select_sdp_backend``) and
``attention.cpp`` (``scaled_dot_product_attention``) of torch 2.11 to 2.13; ``dropout`` takes its fused kernel as in
``Dropout.cpp``, and layer norm stands in for the fused kernel of ``rms_norm`` (``layer_norm.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from autockpt.interpreter import patched
from autockpt.tracing.kernels.cuda_autocast import cuda_autocast
from autockpt.tracing.kernels.flex_attention import flex_on_cuda
from autockpt.tracing.kernels.quantised_kernels import cuda_int8_products
from autockpt.tracing.kernels.triton_launches import LAUNCH, fused_loss_on_cuda, record_launch
from autockpt.workload import grpo

Attention = Literal["cudnn", "flash", "efficient", "math"]
Capability = tuple[int, int]
Unread = Callable[[], AbstractContextManager[None]]
AMPERE: Capability = (8, 0)

# Operators that have no CPU kernel: never run for real, however small their inputs.
_FUSED = [f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")]
CUDA_ONLY = frozenset({LAUNCH, *_FUSED, *(f"{name}_backward" for name in _FUSED)})
_HALF = (torch.float16, torch.bfloat16)
_FLASH_HEAD, _CUDNN_HEAD = 256, 128
_ALIGNMENT = 8  # head sizes are padded to it for flash attention, rows of a mask for the memory-efficient kernel


class AttentionCall(NamedTuple):
    """A call of ``scaled_dot_product_attention``: tensors (batch, heads, length, head size); ``gqa``: heads of keys and
    values may be shared."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    gqa: bool = False


def attention_kernel(call: AttentionCall, capability: Capability = AMPERE) -> Attention:
    """Which kernel CUDA takes for a call."""
    if _cudnn(call, capability):
        return "cudnn"
    if _flash(call, capability):
        return "flash"
    return "efficient" if _efficient(call, capability) else "math"


def _dense(call: AttentionCall) -> bool:
    """Four dimensions, one batch, heads that match (or that may be shared), and elements of a head side by side."""
    query, key, value = tensors = call[:3]
    if any(t.dim() != 4 or t.numel() == 0 or t.stride(-1) != 1 for t in tensors):
        return False
    if len({t.size(0) for t in tensors}) > 1 or key.size(1) != value.size(1):
        return False
    shared = call.gqa and query.size(1) % key.size(1) == 0
    return query.size(1) == key.size(1) or shared


def _cudnn(call: AttentionCall, capability: Capability) -> bool:
    """Preferred on data centre Hopper and Blackwell, with cuDNN 9.15.1 or newer."""
    query, key, value = call[:3]
    major, minor = capability
    if major not in (9, 10) or minor not in (0, 3):
        return False
    sizes = (query.size(-1), value.size(-1))
    fitting = all(size % 8 == 0 and size <= _CUDNN_HEAD for size in sizes) and query.size(-1) == key.size(-1)
    return query.dtype in _HALF and fitting and key.size(2) > 1 and _dense(call)


def _flash(call: AttentionCall, capability: Capability) -> bool:
    """FlashAttention 2: 16 bit, no mask, Ampere or newer."""
    query, key, value = call[:3]
    head = query.size(-1)
    if call.mask is not None or query.dtype not in _HALF or capability < AMPERE:
        return False
    if not head == key.size(-1) == value.size(-1) <= _FLASH_HEAD:
        return False
    if call.causal and query.size(2) != key.size(2):
        return False
    return _dense(call)


def _efficient(call: AttentionCall, capability: Capability) -> bool:
    """The memory-efficient kernel: fp32 as well, masks, no shared heads."""
    query, key, value = call[:3]
    if query.dtype not in (torch.float32, *_HALF) or (query.dtype is torch.bfloat16 and capability < AMPERE):
        return False
    half = query.dtype in _HALF
    tensor_cores = capability >= AMPERE or (capability >= (7, 0) and half)
    alignment = max(4 if capability >= AMPERE else 1, (8 if half else 4) if tensor_cores else 1)
    if query.size(-1) != key.size(-1) or query.size(-1) % alignment or value.size(-1) % alignment:
        return False
    return _dense(call) and query.size(1) == key.size(1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: Capability = AMPERE,
    unread: Unread = nullcontext,
) -> Tensor:
    """``scaled_dot_product_attention`` as CUDA runs it, for ghosts on the CPU; autocast is applied.

    ``unread`` is entered where values are made that nothing but a kernel of CUDA's reads.
    """
    query, key, value = (_autocast(t) for t in (query, key, value))
    asked = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    kernel = attention_kernel(asked, capability)
    with nullcontext() if kernel == "math" else unread():
        mask = _additive(attn_mask, query.dtype)
    saves = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    aten = torch.ops.aten
    if kernel == "cudnn":
        bias = None if mask is None else _expanded(mask, query, key)
        call = aten._scaled_dot_product_cudnn_attention.default
        return call(query, key, value, bias, saves, dropout_p, is_causal, False, scale=scale)[0]
    if kernel == "flash":
        head = query.size(-1)
        padded = [_padded(t) for t in (query, key, value)]
        scale = head**-0.5 if scale is None else scale
        call = aten._scaled_dot_product_flash_attention.default
        return call(*padded, dropout_p, is_causal, False, scale=scale)[0][..., :head]
    if kernel == "efficient":
        if mask is not None and mask.size(-1) % _ALIGNMENT:  # rows must begin at its multiples: a padded copy, sliced
            mask = _padded(mask)[..., : mask.size(-1)]
        bias = None if mask is None else _expanded(mask, query, key)
        call = aten._scaled_dot_product_efficient_attention.default
        return call(query, key, value, bias, saves, dropout_p, is_causal, scale=scale)[0]
    call = aten._scaled_dot_product_attention_math.default
    return call(query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


def _autocast(tensor: Tensor) -> Tensor:
    if torch.is_autocast_enabled("cpu") and tensor.is_floating_point():
        return tensor.to(torch.get_autocast_dtype("cpu"))
    return tensor


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as a bias of the queries' type, made in every call."""
    if mask is None:
        return None
    if mask.dtype is not torch.bool:
        return mask.to(dtype) if torch.is_autocast_enabled("cpu") else mask
    return torch.where(mask.logical_not(), float("-inf"), torch.zeros((), dtype=dtype))


def _expanded(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


def _padded(tensor: Tensor) -> Tensor:
    missing = -tensor.size(-1) % _ALIGNMENT
    return F.pad(tensor, (0, missing)) if missing else tensor


def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> Tensor:
    """In the place of PyTorch's own: modes that look at functions, as what keeps attention's output, see this one as
    they see that. One object for all ghost runs, as they remember functions; ``run`` is the present one's."""
    tensors = query, key, value
    if has_torch_function(tensors):
        return handle_torch_function(scaled_dot_product_attention, tensors, *tensors, *given, **named)
    return scaled_dot_product_attention.run(*tensors, *given, **named)  # type: ignore[attr-defined]


scaled_dot_product_attention.run = F.scaled_dot_product_attention  # type: ignore[attr-defined]  # outside of ghost runs


@contextmanager
def cuda_kernels(capability: Capability, unread: Unread = nullcontext) -> Iterator[None]:
    """Let code that calls ``torch.nn.functional`` take the kernels of CUDA, while a ghost run is under way.

    ``unread`` as for ``attention``.
    """
    plain_norm = torch.rms_norm  # where torch.nn.functional's ends, too

    def rms_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        cast = torch.is_autocast_enabled("cpu")  # all of it to fp32
        if weight is None or (weight.dtype is not input.dtype and not cast):
            return plain_norm(input, normalized_shape, weight, eps)
        # CUDA's fused kernel cannot be called on CPU tensors. Layer norm reads, saves and writes the same, and a mean.
        return F.layer_norm(input, list(normalized_shape), weight, None, eps or 1e-6)

    fused_loss = fused_loss_on_cuda() if capability >= AMPERE else nullcontext()
    with (
        patched(scaled_dot_product_attention, "run", partial(attention, capability=capability, unread=unread)),
        patched(F, "scaled_dot_product_attention", scaled_dot_product_attention),
        patched(F, "rms_norm", rms_norm),
        patched(torch, "rms_norm", rms_norm),
        flex_on_cuda(),
        fused_dropout(),
        cuda_autocast(),
        cuda_int8_products(),
        fused_loss,
        patched(grpo, "launch", record_launch),
    ):
        yield


def fuses_dropout(kind: str) -> bool:
    """Whether dropout is one kernel on that kind of device, as ``Dropout.cpp`` has it."""
    return kind in ("cuda", "xpu", torch._C._get_privateuse1_backend_name())


@contextmanager
def fused_dropout() -> Iterator[None]:
    """Let dropout take the kernel that saves a mask of bytes and no factors, be it called from Python or by another op.

    It has no kernel of its own in the dispatcher, where the CPU is given one for a while.
    """

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:
        if not train or not p or not input.numel():
            return input
        if p == 1:
            return input.mul(torch.zeros((), dtype=input.dtype))
        return torch.native_dropout(input, p, True)[0]

    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", dropout, "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()
