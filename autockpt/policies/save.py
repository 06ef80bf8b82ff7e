"""save: autograd keeps what it needs, as PyTorch does by itself. Nothing is attached, so it costs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from autockpt.policies.base import PlannedUnit, Policy, PolicySession


class SavePolicy(Policy):
    kind: ClassVar[str] = "save"

    def attach(self, units: Sequence[PlannedUnit], session: PolicySession) -> None:
        for unit in units:
            session.note(unit.name, "nothing: autograd keeps what it saves")
