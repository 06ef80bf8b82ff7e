"""What the loop asks of whoever proposes candidates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from autockpt.errors import AutockptError
from autockpt.schema import Choice
from autockpt.tuning.trials import Candidate

if TYPE_CHECKING:
    from autockpt.tuning.loop import Limits

Plans = Mapping[str, Mapping[str, Choice]]  # by what they are called


class Proposer(Protocol):
    """Proposes plans of one question, and knows what its budget means.

    ``known`` are the well-known plans, by name. ``smallest_peak`` is the least reachable peak in bytes, as far as is
    known; 0 where nothing is. What became of a candidate is found among the trials when the next one is asked for.
    """

    known: dict[str, dict[str, Choice]]
    smallest_peak: int

    def begin(self) -> None:
        """Open what proposing needs. Raises InfeasibleError for a budget that is known to be out of reach."""

    def baselines(self, limits: Limits) -> Iterator[Candidate]:
        """Plans to begin with. Asked for the next one when the one before it was tried; raises where none can run."""
        ...

    def resolve(self, stopped: str) -> None:
        """Judge all trials by the budget in bytes, as they tell it. ``stopped``: why there are no more of them."""
        ...

    def candidates(self, limits: Limits) -> Iterator[Candidate]:
        """Plans to try, one after the other, until one of the ``limits`` is reached or none can be better."""
        ...

    def infeasible(self) -> AutockptError:
        """The error for a budget that nothing fits."""
        ...
