"""What Liger Kernel's kernels compute, for a CPU: the arithmetic of liger_kernel/ops/*.py of 0.8, kernel by kernel.

In NumPy, whose memory PyTorch's allocator does not see, as it does not see what a kernel takes.
"""

from typing import Any

import numpy as np
from torch import Tensor


def launched(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
    """In place of ``JITFunction.run``: writes where the kernel writes, unseen by versions and dispatch modes."""
    arrays = [value.detach().numpy() if isinstance(value, Tensor) else value for value in args]
    others = {key: value.detach().numpy() if isinstance(value, Tensor) else value for key, value in named.items()}
    KERNELS[kernel.fn.__name__](*arrays, **others)


def _swiglu_forward(a: Any, b: Any, out: Any, *_: Any, **__: Any) -> None:
    out[...] = a / (1 + np.exp(-a)) * b


def _swiglu_backward(upstream: Any, a: Any, b: Any, *_: Any, **__: Any) -> None:
    sigmoid = 1 / (1 + np.exp(-a))
    silu = a * sigmoid
    a[...], b[...] = upstream * (silu * (1 - sigmoid) + sigmoid) * b, upstream * silu


def _rope(q: Any, _: int, k: Any, __: int, cos: Any, ___: int, sin: Any, *____: Any, **named: Any) -> None:
    sign = -1 if named["BACKWARD_PASS"] else 1
    for x in (q, k):  # (batch, tokens, heads, size)
        half = x.shape[-1] // 2
        c, s = cos[..., None, :half], sign * sin[..., None, :half]
        left, right = x[..., :half].copy(), x[..., half:].copy()
        x[..., :half], x[..., half:] = left * c - right * s, right * c + left * s


def _rms_norm_forward(y: Any, _: int, x: Any, __: int, w: Any, ___: int, rstd: Any, *rest: Any, **____: Any) -> None:
    eps, offset = rest[2:4]
    rstd[...] = 1 / np.sqrt((x**2).mean(-1) + eps)
    y[...] = x * rstd[:, None] * (w + offset)


def _rms_norm_backward(
    dy: Any, _: int, dx: Any, __: int, x: Any, ___: int, ____: Any, w: Any, _____: int, rstd: Any, ______: int,
    dw: Any, *_______: Any, **________: Any,
) -> None:  # fmt: skip
    weighted, inverse = dy * w, rstd[:, None]
    if dw is not None:
        dw[...] = 0
        dw[0] = (dy * x * inverse).sum(0)
    dx[...] = inverse * weighted - inverse**3 * (weighted * x).mean(-1, keepdims=True) * x


def _cross_entropy(**given: Any) -> None:
    logits, target = given["X_ptr"], given["Y_ptr"]
    counts, rows = target != given["ignore_index"], np.arange(len(target))
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    at = np.where(counts, target, 0)
    given["loss_ptr"][...] = np.where(counts, -logs[rows, at] / given["n_non_ignore"], 0)
    logits[...] = np.exp(logs)
    logits[rows, at] -= 1
    logits[...] = np.where(counts[:, None], logits / given["n_non_ignore"], 0)


def _times(x: Any, _: int, factor: Any, *__: Any, **___: Any) -> None:
    x[...] *= factor


KERNELS = {
    "_swiglu_forward_kernel": _swiglu_forward,
    "_swiglu_backward_kernel": _swiglu_backward,
    "_triton_rope": _rope,
    "_rms_norm_forward_kernel": _rms_norm_forward,
    "_rms_norm_backward_kernel": _rms_norm_backward,
    "liger_cross_entropy_kernel": _cross_entropy,
    "element_mul_kernel": _times,
}
