"""Choices by the size of a batch: what a plan holds besides its own choices, for batches that are smaller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from autockpt.schema.base import Data
from autockpt.schema.choices import Choice, dump_choices, parse_choices
from autockpt.schema.trial import Measurement, Prediction

Choices = Annotated[
    dict[str, Choice], BeforeValidator(lambda value: parse_choices(value) if isinstance(value, Mapping) else value)
]
"""By pattern; read as a file has them."""
OF_A_SET = ("when", "share", "predicted", "measured", "choices")


class When(Data):
    """Which batches a set of choices is for: those with at most so many tokens, padding included.

    ``longest`` bounds the sequences as well, where attention keeps scores of every pair of tokens.
    """

    tokens: int = Field(gt=0, description="rows × padded length of a micro-batch")
    longest: int | None = Field(default=None, gt=0, description="padded length; of packed sequences the longest")

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens" + (f", sequences up to {self.longest:,}" if self.longest else "")

    def covers(self, tokens: int, longest: int) -> bool:
        """Whether a batch is no larger than this."""
        return tokens <= self.tokens and (self.longest is None or longest <= self.longest)


class ChoiceSet(Data):
    """Choices for batches that are smaller than what the plan's own choices are for. ``Plan.sets`` makes plans of them.

    ``hash`` and the numbers are as in a plan; ``share`` is how many of all batches were expected to go by this set.
    """

    when: When
    hash: str = ""
    share: float | None = Field(default=None, ge=0, le=1, description="share of all batches")
    predicted: Prediction | None = None
    measured: Measurement | None = None
    choices: Choices = Field(min_length=1)

    @classmethod
    def of(cls, hash: str, values: Mapping[str, Any]) -> ChoiceSet:
        """A set of these values, ``hash`` being that of its choices."""
        when: When = values["when"]
        return cls(**{**values, "hash": f"{hash}@{when.tokens}" if hash else ""})

    @property
    def hash_of_choices(self) -> str:
        """The hash of the choices, as long as they are still for the batches that they were found for."""
        found, _, tokens = self.hash.partition("@")
        return found if tokens in ("", str(self.when.tokens)) else "edited"

    def written(self) -> dict[str, Any]:
        """As it stands in a plan's file."""
        return self.model_dump(mode="json", exclude_defaults=True) | {"choices": dump_choices(self.choices)}
