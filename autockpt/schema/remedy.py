"""What would make a job fit that no plan alone makes fit."""

from __future__ import annotations

from pydantic import Field

from autockpt.schema.base import Data


class WayOut(Data):
    """A change of the job that fits the budget, ghost-run. Nothing of it was measured."""

    options: str = Field(description="what to say on the command line, as --batch-size 1 --accumulate 2")
    effect: str = Field(description="what changes for the training, in words")
    plan: str = Field(description="the uniform choice that was simulated")
    peak_bytes: int = Field(description="simulated, the device's own overhead included")
    step_seconds: float | None = Field(default=None, description="simulated; None where rates are only nominal")
    relative_cost: float = Field(
        description="simulated seconds per token (or row) over those of the leanest plan of the job as it was asked for"
    )
