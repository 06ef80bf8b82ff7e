"""recompute_offload: run a unit's forward again in backward, and keep its input off the device until then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from autockpt.policies.base import PlannedUnit, PolicySession
from autockpt.policies.offload import OffloadPolicy
from autockpt.policies.recompute import run_recomputed
from autockpt.policies.replay import ReplayState
from autockpt.schema.choices import Choice


class RecomputeOffloadPolicy(OffloadPolicy):
    """Offload around a recompute: all that the recompute saves are the unit's inputs, and those leave the device."""

    kind: ClassVar[str] = "recompute_offload"

    def attach(self, units: Sequence[PlannedUnit], session: PolicySession) -> None:
        for unit in units:
            session.place(unit.name, unit.module, run_recomputed, ReplayState(unit.name))
        super().attach(units, session)
        for unit in units:
            session.note(
                unit.name, "recompute_offload: its input leaves the device, its forward runs again in backward"
            )

    def reruns(self, choice: Choice, forward: int) -> tuple[int, int]:
        return min(forward // 2, forward - 1) if forward else 0, forward
