"""The one solver to call: exact, by whichever method is fastest for the problem's structure."""

from __future__ import annotations

from autockpt.schema.problem import Assignment, Problem
from autockpt.solvers.answer import host_excess
from autockpt.solvers.chain import smallest_peak
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp

ROUNDS = 8  # bisections of the budget: to 0.4 % of the range


def leanest(problem: Problem, seconds: float, *, time_limit: float = 2.0) -> Assignment | None:
    """The assignment of least peak that takes at most ``seconds`` over saving everything; None where none fits.

    By bisection of the budget; ``time_limit`` in seconds bounds each solution.
    """
    low, high = smallest_peak(problem), problem.budget_bytes
    found = None
    for _ in range(1 + ROUNDS):
        budget_bytes = high if found is None else (low + high) // 2
        answer = exact(problem.model_copy(update={"budget_bytes": budget_bytes}), time_limit=time_limit)
        if answer.feasible and answer.seconds <= seconds:
            found, high = answer, min(budget_bytes, answer.peak)
        elif found is None:
            return None
        else:
            low = budget_bytes
    return found


def exact(problem: Problem, *, time_limit: float = 10.0, gap: float = 1e-6) -> Assignment:
    """The fastest assignment within the budget, with its proven ``gap``; infeasible is a result (see Assignment).

    By label setting, in milliseconds; problems whose host budget binds by the mixed-integer program. ``time_limit`` in
    seconds, ``gap`` as a share of the step time. Raises ValueError where points do not only count the units before the
    one that runs, as those of every step traced by autockpt do.
    """
    answer = labels(problem, time_limit=time_limit, gap=gap)
    if host_excess(problem, answer.choices) <= 0:
        return answer
    return milp(problem, time_limit=time_limit, gap=gap)
