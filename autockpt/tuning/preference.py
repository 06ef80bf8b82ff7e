"""Which of several equally fast plans a search names: the leanest, and among equally lean ones the simplest.

Predictions and measurements have errors. Within these errors of the fastest step a larger peak buys nothing, and more
kinds of choices only make a plan harder to review and a compiled model larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from autockpt.schema import SAVE, Choice, Trial
from autockpt.tuning.trials import peak_of_trial

AS_FAST = 0.005
"""Share of the step: plans within it of the fastest count as equally fast."""
AS_LEAN = 0.016
"""Share of the budget: peaks within it of the leanest count as equal. The error of predicted peaks on real cards."""


def complexity(choices: Mapping[str, Choice]) -> int:
    """Distinct choices besides saving, plus runs of consecutive units that make the same choice."""
    others = dict.fromkeys(choice for choice in choices.values() if choice != SAVE)
    return len(others) + sum(1 for _ in groupby(choices.values()))


def preferred(plans: Sequence[Trial], seconds: Mapping[int, float], budget_bytes: int, error: float = AS_FAST) -> Trial:
    """The plan to name among ``plans``, which all fit.

    ``seconds`` are their step times by trial number, known within ``error``, a share. No other plan is faster by more
    than that without a larger peak, nor leaner by more than ``AS_LEAN`` of ``budget_bytes`` without a longer step.
    """
    fastest = min(seconds[plan.number] for plan in plans)
    fast = [plan for plan in plans if seconds[plan.number] <= fastest * (1 + error)]
    least = min(map(peak_of_trial, fast))
    lean = [plan for plan in fast if peak_of_trial(plan) <= least + AS_LEAN * budget_bytes]
    return min(lean, key=lambda plan: (complexity(plan.choices), seconds[plan.number], peak_of_trial(plan)))
