"""What the loop asks of the place that steps run on, or are simulated on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autockpt.schema import PlanStatus, Prediction, Trial
from autockpt.tuning.preference import preferred
from autockpt.tuning.refit import ForeseenTimes
from autockpt.tuning.trials import Candidate, Score, Trials

MOST_REPEATS = 12
STEPS, COMPILING = "measured steps", "compiling"
"""What a search's real steps took, and what compiling them did."""

Foresee = Callable[[Sequence[Trial]], ForeseenTimes]


@dataclass(kw_only=True)
class Target:
    """Judges candidates. ``source`` says what its numbers are; ``notes`` what people should know.

    The space counts as exhausted after ``most_repeats`` known plans in a row. ``worthwhile`` is the share of the step
    below which a gain is not worth a ghost run; ``most_candidates`` ends a search early where it is given, and so do
    ``patience`` candidates in a row that bring no such gain. Where ``knows_seconds`` is False they rank plans and are
    shown to nobody.
    """

    source: PlanStatus = "measured"
    most_repeats: int = MOST_REPEATS
    worthwhile: float = 0.0
    most_candidates: int | None = None
    patience: int | None = None
    knows_seconds: bool = True
    notes: list[str] = field(default_factory=list)

    def begin(self, trials: Trials, foresee: Foresee | None = None) -> None:
        """To be called with the trials of the question before any is scored.

        ``foresee`` says what is expected of trials, which decides between those that steps cannot tell apart.
        """

    def score(self, candidate: Candidate, predicted: Prediction | None, budget_bytes: int | None) -> Score | None:
        """Judge a plan; None where time ran out over it. ``budget_bytes``: a limit to hold where the device has one."""
        raise NotImplementedError

    def reserved(self, trials: Trials, compared: Sequence[Trial]) -> float:
        """Seconds of the time limit in which no further plan is begun."""
        return 0.0

    def winner(self, trials: Trials, compared: Sequence[Trial], budget_bytes: int, seconds: float) -> Trial | None:
        """The plan to name, of those that fit; None where none holds the budget.

        ``compared`` are well-known plans to time with the best; ``seconds`` are left to do so.
        """
        fitting = trials.ranking()
        return preferred(fitting, {t.number: t.score_seconds for t in fitting}, budget_bytes) if fitting else None
