"""What verification found out about a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autockpt.schema.base import Data
from autockpt.schema.plan import Steps
from autockpt.schema.trial import Measurement

CheckState = Literal["passed", "failed", "skipped", "measured"]
"""``measured``: a finding, with nothing that it is held against."""


class Check(Data):
    """One promise of a plan, held against real steps, or what they take where nothing was promised for such steps."""

    name: str = Field(description="gradients, recomputed ops, peak, step time, …")
    state: CheckState
    detail: str = Field(default="", description="what was compared with what, in words and numbers")


class VerifyReport(Data):
    """All checks of one plan on one device. ``skipped`` says in its detail why."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    measured: Measurement | None = Field(default=None, description="what the plan's steps took")
    steps: Steps | None = Field(
        default=None, description="where they were compiled otherwise than those the plan was made for: how"
    )

    @property
    def passed(self) -> bool:
        """No check failed and at least one was made."""
        states = [c.state for c in self.checks]
        return "passed" in states and "failed" not in states
