"""recompute: keep a unit's inputs only and run its forward again in backward (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autockpt.policies.attachment import acts, call_inner, call_plainly
from autockpt.policies.base import PlannedUnit, Policy, PolicySession
from autockpt.policies.conflicts import refuse_late_writes, refuse_native
from autockpt.policies.kvcache import without_cache
from autockpt.policies.region import UnitCall
from autockpt.policies.replay import Replay, ReplayState
from autockpt.schema.choices import Choice


class RecomputePolicy(Policy):
    kind: ClassVar[str] = "recompute"

    def attach(self, units: Sequence[PlannedUnit], session: PolicySession) -> None:
        for unit in units:
            refuse_late_writes(unit.module, unit.name)
            session.place(unit.name, unit.module, run_recomputed, ReplayState(unit.name))
            session.note(unit.name, "recompute: its inputs are kept, its forward runs again in backward")

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        # it stops as soon as all is there that backward needs: a last product, LoRA's beside it, need not run again
        return min(forward // 2, forward - 1) if forward else 0, forward


def run_recomputed(module: nn.Module, state: ReplayState, /, *args: Any, **kwargs: Any) -> Any:
    """The unit's forward; where gradients are enabled, what it saves is dropped and made again in backward.

    Raises ConflictError where the forward cannot be run twice (a filled KV cache, inputs changed in place). In backward
    ConflictError where it does not do again what it did, InPlaceError where something that it read was changed since.
    """
    if not acts(state):
        return call_plainly(module, state, args, kwargs)
    if torch.compiler.is_compiling():
        # A compiler takes no recompute but torch's own into a graph. What it makes of it looks after random state and
        # in-place changes itself.
        inner = functools.partial(call_inner, module, state)
        return checkpoint(inner, args, kwargs, use_reentrant=False, preserve_rng_state=True)
    return run_twice(module, state, args, kwargs, Replay)


def run_twice(
    module: nn.Module, state: ReplayState, args: tuple[Any, ...], kwargs: dict[str, Any], make: type[Replay]
) -> Any:
    """The unit's forward, and in backward once more; ``make`` is the replay that does both. Errors as ``recompute``."""
    refuse_native(module, state.unit)
    args, kwargs = without_cache(module, state.unit, args, kwargs)
    return UnitCall(make(module, state, args, kwargs)).run()
