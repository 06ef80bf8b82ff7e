"""What ghost runs alone say beside an answer: plans for other budgets, changes of the job."""

from __future__ import annotations

from pydantic import Field

from autockpt.schema.base import Data
from autockpt.schema.choices import Choice
from autockpt.schema.trial import Prediction


class Alternative(Data):
    """A change of the job that fits the budget, ghost-run. Nothing of it was measured."""

    options: str = Field(description="the changed settings of the job: batch size 1, accumulate 2")
    effect: str = Field(description="what changes for the training, in words")
    plan: str = Field(description="the uniform choice that was simulated")
    peak_bytes: int = Field(description="simulated, the device's own overhead included")
    spare_bytes: int | None = Field(default=None, description="what it leaves of the budget")
    step_seconds: float | None = Field(default=None, description="simulated; None where rates are only nominal")
    relative_cost: float = Field(
        description="simulated seconds per token (or row) over those of the leanest plan of the job as it was asked for"
    )


class GhostAnswer(Data):
    """A plan and what its ghost run says. ``peak_bytes`` is the least budget that it was found to fit."""

    choices: dict[str, Choice]
    predicted: Prediction


class Outlook(Data):
    """Written when a search ends. Nothing of it was measured."""

    plans: tuple[GhostAnswer, ...] = Field(default=(), description="ghost-run by the search, trials among them")
    changes: tuple[Alternative, ...] = Field(default=(), description="what would make the job fit, where nothing fits")
    infeasible: str = Field(default="", description="why no plan was found, where nothing fits")


# -- changes in the words of the field, which hold for options, arguments and trainers alike

SMALLER = "use a smaller batch (accumulate keeps its effect), shorter sequences, LoRA, or SGD"
INEXACT = "inexact choices allowed (allow_inexact)"
FOUR_BITS = "base weights in 4 bits (NF4, quantised twice)"


def batch(rows: int, accumulate: int) -> str:
    """Micro-batches of so many rows."""
    return f"batch size {rows}, accumulate {accumulate}"


def joined(*changes: str) -> str:
    """Several changes as one."""
    return ", ".join(filter(None, changes))
