"""Launches of Triton's kernels, which write to tensors where neither a version counter nor a dispatch mode sees it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Launch = Callable[..., Any]
Instead = Callable[[Any, Launch, tuple[Any, ...], dict[str, Any]], Any]

READS: dict[str, frozenset[int]] = {
    "_swiglu_forward_kernel": frozenset((0, 1)),
    "_swiglu_forward_kernel_tiled": frozenset((0, 1)),
    "_geglu_tanh_forward_kernel": frozenset((0, 1)),
    "_rms_norm_forward_kernel": frozenset((2, 4)),
    "_block_rms_norm_forward_kernel": frozenset((2, 4)),
}
"""By kernel the positions of arguments that it only reads: Liger Kernel's (liger_kernel/ops/swiglu.py, geglu.py and
rms_norm.py of 0.8). Any other is taken to write to all that it is given, as Liger's for rotary embeddings does."""


@contextmanager
def launches(instead: Instead, *, tuned: bool = False) -> Iterator[None]:
    """Call ``instead(kernel, launch, args, kwargs)`` in place of every launch.

    With ``tuned`` also in place of those that would try settings out first.
    """
    places = [("triton.runtime.jit", "JITFunction"), *([("triton.runtime.autotuner", "Autotuner")] if tuned else ())]
    kinds = (getattr(sys.modules.get(module), name, None) for module, name in places)
    plain = [(kind, kind.run) for kind in kinds if kind is not None]
    for kind, run in plain:
        kind.run = _calling(instead, run)
    try:
        yield
    finally:
        for kind, run in plain:
            kind.run = run


def _calling(instead: Instead, plain: Launch) -> Launch:
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        return instead(kernel, plain, args, kwargs)

    return run


def name_of(kernel: Any) -> str:
    """The name of a kernel's Python function."""
    return str(getattr(getattr(kernel, "fn", kernel), "__name__", type(kernel).__name__))
