"""The dispatch mode that hands the ops of a recorded forward to a recorder, and what must not run under any such mode.

Some ops give other results as soon as a dispatch mode looks on, one that does nothing included: those of the CPU's and
CUDA's backends are known. Compiled code runs uncompiled there, with other last bits.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.op_recorder import OpRecorder
from autockpt.checkpointing.op_table import kind_of
from autockpt.checkpointing.replay_context import autocast_depth
from autockpt.errors import ConflictError
from autockpt.policies.compiling import changes_bits, compiled_by, run_as_it_is


def _overloads(*names: str) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(getattr(p, overload) for p in packets if p is not None for overload in p.overloads())


# Of complex numbers: a conjugate that they take inside is not applied (pytorch#198118, open as of torch 2.15).
_OF_COMPLEX = _overloads("linalg_pinv", "linalg_polar", "linalg_matrix_sqrth")
# Under autocast: the matrix products inside of their kernels are cast only where no mode is.
_UNDER_AUTOCAST = _overloads("_sparse_addmm", "_trilinear")


class Watching(TorchDispatchMode):
    """Hands the ops of ``unit`` to a recorder. Raises ConflictError for those that would give something else."""

    supports_higher_order_operators = True  # to refuse them

    def __init__(self, unit: str, recorder: OpRecorder) -> None:
        super().__init__()
        self._unit, self._recorder = unit, recorder

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if raised[0] is not None and (compiler := sys.modules.get("torch._dynamo")) is not None:
            compiler.reset()  # it never compiles what it first met under a mode

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # not wrapped by torch, which costs more than looking at an op

    @partial(run_as_it_is, calls=False)
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with compiled_by(None) as compiler:  # else it would take on what is called here
            if (what := self._changed(func, args, compiler)) is not None:
                raise ConflictError(
                    f"{self._unit} calls {what}, where its ops are watched",
                    remedy=f"Use recompute, selective, offload or save on {self._unit}, or name modules that do not "
                    "call it in `within`.",
                )
            out = self._recorder.run(func, args, kwargs or {})
            # Inside a dispatch mode writes over lists do not count as changes in place (torch 2.13), which autograd and
            # all who look for changes go by.
            if kind_of(func) == "writes" and func._schema.name.startswith("aten::_foreach_"):
                torch.autograd.graph.increment_version([tensor for tensor in args[0] if not tensor.is_inference()])
            return out

    def _changed(self, func: Any, args: tuple[Any, ...], compiler: Any) -> str | None:
        """What would give something else here, in words."""
        if isinstance(func, HigherOrderOperator):
            return f"{func.name()} (torch.cond and the like), whose functions would not be compiled"
        if compiler and changes_bits(compiler):
            return "compiled code (torch.compile), which torch then runs uncompiled, with other last bits"
        if func in _OF_COMPLEX and args[0].is_complex():
            return f"{func} of complex numbers, which then gives wrong values (pytorch#198118)"
        if func in _UNDER_AUTOCAST and autocast_depth():  # inside a dispatch mode autocast says that it is off
            return f"{func} under autocast, which then computes with another precision"
        return None
