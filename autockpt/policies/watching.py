"""Ops whose results change as soon as a dispatch mode looks on, one that does nothing included.

They are those of the CPU's and CUDA's backends. Of others nothing is known.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.replay_context import autocast_depth
from autockpt.errors import ConflictError
from autockpt.policies.compiling import changes_bits, run_as_it_is, set_compiler


def _overloads(*names: str) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(getattr(p, overload) for p in packets if p is not None for overload in p.overloads())


# Of complex numbers: a conjugate that they take inside is not applied (pytorch#198118, open as of torch 2.15).
_OF_COMPLEX = _overloads("linalg_pinv", "linalg_polar", "linalg_matrix_sqrth")
# Under autocast: the matrix products inside of their kernels are cast only where no mode is.
_UNDER_AUTOCAST = _overloads("_sparse_addmm", "_trilinear")
CHANGED_BY_WATCHING = _OF_COMPLEX | _UNDER_AUTOCAST


def count_writes(func: Any, args: tuple[Any, ...]) -> None:
    """An op that writes to tensors has run. Inside a dispatch mode those over lists do not count as changes in place
    (torch 2.13), which autograd and all who look for changes go by."""
    if func._schema.name.startswith("aten::_foreach_"):
        torch.autograd.graph.increment_version([tensor for tensor in args[0] if not tensor.is_inference()])


def refuse_watching(func: Any, args: tuple[Any, ...], unit: str) -> None:
    """Raise ConflictError where this call of one of ``CHANGED_BY_WATCHING`` would give something else."""
    if func in _OF_COMPLEX and args[0].is_complex():
        what = "of complex numbers give wrong values (pytorch#198118)"
    elif func in _UNDER_AUTOCAST and autocast_depth():  # inside a dispatch mode autocast says that it is off
        what = "under autocast compute with another precision"
    else:
        return
    raise ConflictError(
        f"watching the ops within {unit} would make {func} {what}",
        remedy=f"Use recompute, selective, offload or save on {unit}, or name modules that do not call it in `within`.",
    )


class Watching(TorchDispatchMode):
    """A mode that looks at the ops of ``unit``."""

    supports_higher_order_operators = True  # to refuse them

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if raised[0] is not None and (compiler := sys.modules.get("torch._dynamo")) is not None:
            compiler.reset()  # it never compiles what it first met under a mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # not wrapped by torch, which costs more than looking at an op

    @partial(run_as_it_is, calls=False)
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        compiler = set_compiler(None)  # else it would take on what is called here
        try:
            if isinstance(func, HigherOrderOperator):
                what = f"{func.name()} (torch.cond and the like), whose functions would not be compiled"
                raise self._refusal(what, "call it elsewhere")
            if compiler and changes_bits(compiler):
                what = "compiled code (torch.compile), which torch then runs uncompiled, with other last bits"
                raise self._refusal(what, "do not compile it")
            return self.look(func, args, kwargs or {})
        finally:
            set_compiler(compiler)

    def look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op; its result."""
        raise NotImplementedError

    def _refusal(self, what: str, otherwise: str) -> ConflictError:
        return ConflictError(
            f"{self._unit} calls {what}, where its ops are watched",
            remedy=f"Use recompute, offload or save on {self._unit}, or {otherwise}.",
        )
