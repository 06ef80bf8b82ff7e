"""recompute_offload: run a unit's forward again in backward, and keep its input off the device until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import nn

from autockpt.policies.base import PlannedUnit, PolicySession
from autockpt.policies.compiling import outside_graphs, set_compiler
from autockpt.policies.offload import OffloadPolicy, OffloadState, offloaded
from autockpt.policies.recompute import RecomputePolicy


@outside_graphs("recompute_offload", "moves what autograd saves by way of hooks")
def run_recomputed_and_offloaded(module: nn.Module, state: OffloadState, /, *args: Any, **kwargs: Any) -> Any:
    """Around a recompute, which saves nothing but the unit's inputs: those leave the device."""
    compiler = set_compiler(None)
    try:
        return offloaded(module, state, args, kwargs, compiler)
    finally:
        set_compiler(compiler)


class RecomputeOffloadPolicy(OffloadPolicy, RecomputePolicy):
    """Offload around a recompute, whose forward runs again as ever."""

    kind: ClassVar[str] = "recompute_offload"
    run: ClassVar[Callable[..., Any]] = staticmethod(run_recomputed_and_offloaded)
    words: ClassVar[str] = "its input leaves the device, its forward runs again in backward"

    def attach(self, units: Sequence[PlannedUnit], session: PolicySession) -> None:
        RecomputePolicy.attach(self, units, session)
        super().attach(units, session)
