"""save: autograd keeps what it needs, as PyTorch does by itself. Nothing is attached, so it costs nothing."""

from __future__ import annotations

from typing import ClassVar

from autockpt.policies.base import PlannedUnit, Policy, PolicySession


class SavePolicy(Policy):
    kind: ClassVar[str] = "save"

    def attach_to(self, unit: PlannedUnit, session: PolicySession) -> str:
        return "nothing: autograd keeps what it saves"
