"""What a search knows beyond its answer: plans for other budgets, and changes of the job, by ghost runs alone."""

from __future__ import annotations

from pydantic import Field

from autockpt.schema.base import Data
from autockpt.schema.choices import Choice
from autockpt.schema.remedy import Alternative
from autockpt.schema.trial import Prediction


class GhostAnswer(Data):
    """A plan and what its ghost run says. ``peak_bytes`` is the least budget that it was found to fit."""

    choices: dict[str, Choice]
    predicted: Prediction


class Outlook(Data):
    """Written when a search ends. Nothing of it was measured."""

    plans: tuple[GhostAnswer, ...] = Field(default=(), description="ghost-run by the search, trials among them")
    changes: tuple[Alternative, ...] = Field(default=(), description="what would make the job fit, where nothing fits")
    infeasible: str = Field(default="", description="why no plan was found, where nothing fits")
