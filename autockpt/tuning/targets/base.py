"""What a search asks of the place that steps run on, or are simulated on: a target is asked, and drives nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from autockpt.profiling import CostModel
from autockpt.schema import Environment, Graph, PlanStatus, Trial
from autockpt.tuning.alternatives import WhatIf
from autockpt.tuning.opening import Traced
from autockpt.tuning.question import Question
from autockpt.tuning.trials import Candidate, Score, Trials, preferred

MOST_REPEATS = 12
STEPS, COMPILING = "measured steps", "compiling"
"""What a search's real steps took, and what compiling them did."""


@dataclass(frozen=True)
class Terms:
    """What a target's numbers are good for, and how much work a candidate is worth.

    ``source`` says what its numbers are; where ``knows_seconds`` is False they rank plans and are shown to nobody.
    ``worthwhile`` is the share of the step below which a gain is not worth a ghost run, ``checks`` the ghost runs that
    may be spent on refining one candidate. The space counts as exhausted after ``most_repeats`` known plans in a row;
    ``most_candidates`` ends a search early where it is given, and so do ``patience`` candidates in a row that bring no
    such gain.
    """

    source: PlanStatus = "measured"
    knows_seconds: bool = True
    worthwhile: float = 0.0
    checks: int = 8
    most_repeats: int = MOST_REPEATS
    most_candidates: int | None = None
    patience: int | None = None


@dataclass(frozen=True)
class Prepared:
    """A question on its target, with the ghost runs that it begins with.

    ``device`` names the run. ``needs`` says what a ghost run takes of the device; ``what_if`` judges changes of the job
    (None: none are looked for).
    """

    question: Question
    environment: Environment
    found: Traced
    device: str
    needs: Callable[[Graph], int]
    what_if: Callable[[], WhatIf] | None = None


@dataclass(kw_only=True)
class Target:
    """Ghost-runs a question, says what choices cost, and judges candidates on its ``terms``.

    ``notes`` is what people should know.
    """

    terms: Terms = Terms()
    notes: list[str] = field(default_factory=list)

    def trace(self, stack: ExitStack) -> Prepared:
        """The question, ghost-run; ``stack`` keeps open what later ghost runs need. Raises UsageError."""
        raise NotImplementedError

    def cost_model(self, prepared: Prepared, trials: Trials) -> CostModel | None:
        """What choices cost; None where steps can only be measured. ``trials`` are those of earlier runs."""
        raise NotImplementedError

    def score(self, candidate: Candidate, budget_bytes: int | None) -> Score | None:
        """Judge a plan; None where time ran out over it. ``budget_bytes``: a limit to hold where the device has one."""
        raise NotImplementedError

    def reserved(self, trials: Trials, known: Sequence[Trial]) -> float:
        """Seconds of the time limit in which no further plan is begun."""
        return 0.0

    def winner(self, trials: Trials, known: Sequence[Trial], budget_bytes: int, seconds: float) -> Trial | None:
        """The plan to name, of those that fit; None where none holds the budget.

        ``known`` are the trials of well-known plans, to time with the best; ``seconds`` are left to do so.
        """
        fitting = trials.ranking()
        return preferred(fitting, {t.number: t.score_seconds for t in fitting}, budget_bytes) if fitting else None
