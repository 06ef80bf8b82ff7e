"""What the loop asks of whoever proposes candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from autockpt.errors import AutockptError
from autockpt.schema import Choice, Prediction, ResolvedBudget, Trial
from autockpt.tuning.trials import Candidate, Score

Plans = Mapping[str, Mapping[str, Choice]]  # by what they are called


class Proposer(Protocol):
    """Proposes plans of one question, and knows what its budget means. ``known`` are the well-known plans, by name.

    ``budget`` None: not known in bytes yet. ``notes`` is what people should know.
    """

    known: dict[str, dict[str, Choice]]
    notes: list[str]
    budget: ResolvedBudget | None
    smallest_peak: int
    """The least reachable peak in bytes, as far as is known."""

    @property
    def tries_one_late(self) -> bool:
        """Whether one plan is worth a trial where the time limit is over before any was proposed."""
        return False

    @property
    def most_baselines(self) -> int:
        """How many baselines there are at most."""
        return len(self.known)

    def most_steps(self, left: int) -> int:
        """How many steps the search's progress has, where so many candidates may be tried."""
        return max(0, left)

    @property
    def knows_the_budget(self) -> bool:
        """Whether the trials so far say what the budget is in bytes."""
        return True

    def begin(self) -> None:
        """Open what proposing needs. Raises InfeasibleError for a budget that is known to be out of reach."""
        ...

    def baselines(self, used_up: Callable[[], bool]) -> Iterator[Candidate]:
        """Plans to begin with. Asked for the next one when the one before it was tried; raises where none can run."""
        ...

    def resolve(self, stopped: str) -> int:
        """The budget in bytes, by the trials so far; ``budget`` from now on. ``stopped``: why there are no more."""
        ...

    def learn_budget(self) -> None:
        """To be called when all trials were held against the budget."""

    def first(self, used_up: Callable[[], bool]) -> Iterator[Candidate]:
        """Plans to try before ``propose`` is asked; none that take work to find where the limits are ``used_up``."""
        ...

    def propose(self) -> Candidate:
        """The next plan to try."""
        ...

    def last(self) -> Iterator[Candidate]:
        """Plans to try after all others: leaner or simpler than the best, and as fast."""
        return iter(())

    def tell(self, candidate: Candidate, trial: Trial | None, fresh: bool) -> None:
        """What became of a proposed plan; ``fresh``: it was tried just now. None where it was not."""
        ...

    def foresee(self, candidate: Candidate) -> tuple[Prediction | None, Score | None]:
        """What is predicted of a plan, and how it is judged by that where no step is worth it."""
        return None, None

    def compared(self) -> Sequence[Trial]:
        """Trials of well-known plans that the finals time as well."""
        ...

    def nothing_left(self) -> str:
        """Why nothing better can be found; empty where it can."""
        return ""

    def infeasible(self) -> AutockptError:
        """The error for a budget that nothing fits."""
        ...
