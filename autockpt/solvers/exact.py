"""The one solver to call: exact, by whichever method is fastest for the problem's structure."""

from __future__ import annotations

from autockpt.schema.problem import Assignment, Problem
from autockpt.solvers.answer import host_excess
from autockpt.solvers.labels import labels
from autockpt.solvers.milp import milp


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
