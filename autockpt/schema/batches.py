"""The answer to "which batch?": settings of one optimizer update side by side, of which one is the best."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autockpt.schema import words
from autockpt.schema.base import Data
from autockpt.schema.request import SearchOutcome
from autockpt.schema.sizes import format_binary
from autockpt.schema.trial import Measurement, Prediction


class BatchSetting(Data):
    """One way to come to the same rows in every optimizer update: micro-batch × accumulation, and the best plan for it.

    ``score`` is a measurement, or the prediction of a simulated search; its seconds are those of a whole update.
    """

    batch_size: int
    accumulate: int
    plan: str = Field(description="what the layers do, in words")
    score: Measurement | Prediction
    work: float = Field(description="tokens of an update; rows, where the batch holds no tokens")

    @property
    def update_seconds(self) -> float:
        """Seconds of one optimizer update."""
        assert self.score.step_seconds is not None
        return self.score.step_seconds

    @property
    def per_second(self) -> float:
        """Tokens (or rows) per second."""
        return self.work / self.update_seconds

    def cells(self, best: BatchSetting) -> list[str]:
        """Batch size, accumulation, plan, peak, update, units per second, and these as a share of the best's."""
        mark = "" if isinstance(self.score, Measurement) else "~"
        return [
            str(self.batch_size),
            str(self.accumulate),
            self.plan,
            f"{mark}{format_binary(self.score.peak_bytes)}",
            words.step_of(self.score),
            f"{mark}{self.per_second:,.0f}",
            f"{self.per_second / best.per_second:.0%}",
        ]


class BatchAnswer(Data):
    """The most tokens per second for a number of rows per update: the best setting, its search, and the others."""

    rows_per_update: int
    unit: Literal["tokens", "rows"]
    best: BatchSetting
    others: tuple[BatchSetting, ...] = ()
    outcome: SearchOutcome
    trials: int = Field(description="of all sizes together, well-known plans among them, as outcomes count them")
    seconds: float = Field(description="wall time of it all")
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """All settings in a line of text each, the best first: for a log."""
        lines = []
        for setting in (self.best, *self.others):
            rows, times, plan, peak, seconds, rate, share = setting.cells(self.best)
            lines.append(f"{rows} × {times}: {rate} {self.unit}/s ({share}), update {seconds}, peak {peak}, {plan}")
        return lines
