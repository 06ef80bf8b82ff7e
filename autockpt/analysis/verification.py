"""What verification found out about a plan."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autockpt.schema.base import Data
from autockpt.schema.trial import Measurement

CheckState = Literal["passed", "failed", "skipped"]


class Check(Data):
    """One promise of a plan, compared with real steps."""

    name: str = Field(description="gradients, recomputed ops, peak, step time, …")
    state: CheckState
    detail: str = Field(default="", description="what was compared with what, in words and numbers")


class VerifyReport(Data):
    """All checks of one plan on one device. ``skipped`` says in its detail why."""

    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    measured: Measurement | None = Field(default=None, description="what the plan's steps took")

    def __str__(self) -> str:
        rows = [f"{check.name} {check.state}: {check.detail}" for check in self.checks]
        return "\n".join([*rows, *(f"• {note}" for note in self.notes), self.verdict])

    @property
    def verdict(self) -> str:
        """What follows from the checks, in one sentence."""
        failed = [c.name for c in self.checks if c.state == "failed"]
        if failed:
            return f"The plan does not keep its promise: {', '.join(failed)}."
        if any(c.state == "passed" for c in self.checks if c.name in ("peak", "step time")):
            return "The plan keeps its promise."
        if self.passed:
            return "No check failed; no peak or step time was compared with the plan's."
        return "Nothing could be checked."

    @property
    def passed(self) -> bool:
        """No check failed and at least one was made."""
        states = [c.state for c in self.checks]
        return "passed" in states and "failed" not in states
