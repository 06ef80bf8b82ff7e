"""Turn picked options into an Assignment, judged by the problem's own numbers."""

from __future__ import annotations

from collections.abc import Sequence

from autockpt.schema.problem import Assignment, Problem, host_of, peak_of, seconds_of

ROUNDING = 1e-12  # share of the largest number that sums of a few hundred floats may err by


def judge(problem: Problem, picks: Sequence[int], *, gap: float = 0.0) -> Assignment:
    """The Assignment of options picked by index; its seconds, peak and feasibility are the problem's own numbers."""
    choices = {unit.name: unit.options[pick].choice for unit, pick in zip(problem.units, picks, strict=True)}
    peak, limit = peak_of(problem, choices), problem.host_budget
    return Assignment(
        choices=choices,
        feasible=peak <= problem.budget_bytes and (limit is None or host_of(problem, choices) <= limit),
        seconds=seconds_of(problem, choices),
        peak=peak,
        gap=gap,
    )


def relative_gap(problem: Problem, seconds: float, bound: float) -> float:
    """Distance of ``seconds`` from a proven lower ``bound`` (both extra seconds), as a share of the step time.

    A distance within the rounding of the problem's own seconds is none: step times may be zero, rounding is not.
    """
    total = problem.base_seconds + seconds
    largest = max([abs(total), *(abs(o.seconds) for unit in problem.units for o in unit.options)]) or 1.0
    missing = seconds - bound
    return 0.0 if missing <= ROUNDING * largest else missing / max(abs(total), ROUNDING * largest)
