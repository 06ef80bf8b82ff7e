"""CUDA's autocast for ghosts on the CPU: which ops cast to 16 bit, which to fp32, as the card would.

The two devices differ: CUDA computes norms, softmax, sums, powers and losses in fp32, the CPU in 16 bit. The dispatcher
knows which ops CUDA casts, in builds without CUDA as well. The lists here are those of
``aten/src/ATen/autocast_mode.h`` (``AT_FORALL_LOWER_PRECISION_FP``, ``AT_FORALL_PROMOTE``) of torch 2.11 to 2.15, with
``_cudnn_rnn``, which only builds with cuDNN register; all others are cast to fp32, or give it where they take a type.
These kernels take the place of the CPU's in the dispatcher, so that ops inside of ops are seen as well.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from autockpt.interpreter import patched
from autockpt.tracing.kernels.operators import flat_tensors

_KEY = "AutocastCPU"
# Where the CPU has a kernel of the same policy, that one stays: it keeps the casts of weights for the step.
LOWER_PRECISION = frozenset(
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "  # noqa: SIM905
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm "
    "bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell "
    "rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution "
    "cudnn_convolution_transpose _cudnn_rnn".split()
)
PROMOTE = frozenset(
    "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()  # noqa: SIM905
)
_REFUSED = "binary_cross_entropy"  # by CUDA
# Of the CPU's own: the same cast as CUDA's of the op that they end in, with the CPU's cache.
_LEFT = frozenset({"conv1d.padding", "conv2d.padding", "conv3d.padding"})


def overloads(key: str) -> frozenset[str]:
    """Names (``sum.dim_IntList``) of the ATen overloads that have an autocast kernel for a dispatch key."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return frozenset(name.removeprefix("aten::") for name in found if name.startswith("aten::"))


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let autocast, on the CPU or asked for on CUDA, cast what it casts on CUDA; in the whole process, meanwhile."""
    cls = torch.autocast
    plain_init, plain_enter = cls.__init__, cls.__enter__
    library: list[torch.library.Library] = []

    def init(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":  # a user's own step: the ghosts are on the CPU
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        plain_init(self, device_type, dtype, *args, **kwargs)

    def enter(self: Any) -> Any:
        if self._enabled and not library:  # most steps never do: replacing a hundred kernels takes 50 ms
            library.append(torch.library.Library("aten", "IMPL"))
            with warnings.catch_warnings(action="ignore"):  # that kernels are replaced is the point
                _register(library[0])
        return plain_enter(self)

    try:
        with patched(cls, "__init__", init), patched(cls, "__enter__", enter):
            yield
    finally:
        for entry in library:
            entry._destroy()


def _register(library: torch.library.Library) -> None:
    known, on_cuda = overloads(_KEY), overloads("AutocastCUDA") - {_REFUSED} | LOWER_PRECISION
    fp32 = on_cuda - LOWER_PRECISION - PROMOTE
    typed = frozenset(n for n in fp32 if any(a.name == "dtype" for a in _overload(n)._schema.arguments))
    makers: tuple[tuple[frozenset[str], Callable[[Any], Callable[..., Any]]], ...] = (
        (LOWER_PRECISION - known, lambda op: _casting(op, _lower)),
        (fp32 - typed, lambda op: _casting(op, lambda tensors: torch.float32)),
        (typed, _with_fp32_result),
        (PROMOTE, lambda op: _casting(op, _widest)),
        (known - on_cuda - _LEFT, lambda op: torch.library.fallthrough_kernel),  # cast on the CPU only
    )
    for names, make in makers:
        for op in filter(None, map(_overload, names)):
            library.impl(op, make(op), _KEY)


def _overload(name: str) -> Any:
    """The overload of a name, or None where this torch has none."""
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _casting(op: Any, dtype_for: Callable[[list[Tensor]], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _no_autocast():
            dtype = dtype_for(_eligible((args, tuple(kwargs.values()))))
            return op(*_cast(args, dtype), **{name: _cast(value, dtype) for name, value in kwargs.items()})

    return kernel


def _with_fp32_result(op: Any) -> Callable[..., Any]:
    """``dtype=float32`` where the caller named none; the op casts as it reads. It is the last argument by position."""
    position = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _no_autocast():
            given = args[position] if position < len(args) else kwargs.get("dtype")
            if given is None and _eligible(args[:1]):
                args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            return op(*args, **kwargs)

    return kernel


def _lower(tensors: list[Tensor]) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(tensors: list[Tensor]) -> torch.dtype:
    return torch.float32 if any(t.dtype is torch.float32 for t in tensors) else _lower(tensors)


def _eligible(value: Any) -> list[Tensor]:
    """Tensors that autocast casts: floating point, but not double."""
    return [t for t in flat_tensors(value) if t.is_floating_point() and t.dtype is not torch.float64]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if _eligible(value) else value
    return type(value)(_cast(item, dtype) for item in value) if type(value) in (list, tuple) else value


def _no_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
