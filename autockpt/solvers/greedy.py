"""A plan in milliseconds when there is no time for proof: the leanest one, made faster change by change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autockpt.schema.problem import Assignment, Problem
from autockpt.solvers.answer import as_choices, judge, relative_gap
from autockpt.solvers.chain import PointBytes, is_chain, smallest_peak

PASSES = 20


def greedy(problem: Problem) -> Assignment:
    """A feasible assignment where one was found; its ``gap`` is only that to every unit's fastest option.

    Starts from the leanest assignment (exact where the problem is a chain, by descent elsewhere) and takes changes that
    fit in order of seconds gained per byte kept. Where even the leanest does not fit, the result is infeasible and
    ``smallest_peak`` is the least peak it found.
    """
    picks = smallest_peak(problem)[1] if is_chain(problem) else _descend(problem)
    start = judge(problem, as_choices(problem, picks), method="greedy")
    if not start.feasible:
        return start.model_copy(update={"smallest_peak": start.peak})
    better = judge(problem, as_choices(problem, polish(problem, picks)), method="greedy")
    fastest = sum(min(o.seconds for o in unit.options) for unit in problem.units)
    return better.model_copy(update={"gap": relative_gap(problem, better.seconds, fastest)})


def polish(problem: Problem, picks: Sequence[int]) -> list[int]:
    """Option indices after every single change that saves seconds and still fits has been taken, best first."""
    held = PointBytes(problem, picks)
    for _ in range(PASSES):
        changed = False
        for i, j in _ranked_gains(problem, held.picks):
            saves = problem.units[i].options[j].seconds < problem.units[i].options[held.picks[i]].seconds
            if saves and held.peak_after(i, j) <= problem.budget_bytes:
                held.take(i, j)
                changed = True
        if not changed:
            break
    return held.picks


def _ranked_gains(problem: Problem, picks: Sequence[int]) -> list[tuple[int, int]]:
    ranked: list[tuple[float, int, int]] = []
    for i, unit in enumerate(problem.units):
        now = unit.options[picks[i]]
        for j, option in enumerate(unit.options):
            gain = now.seconds - option.seconds
            if gain > 0:
                ranked.append((gain / max(1, option.kept - now.kept), i, j))
    return [(i, j) for _, i, j in sorted(ranked, key=lambda entry: -entry[0])]


def _descend(problem: Problem) -> list[int]:
    """Local descent on the peak, from the assignment that keeps least."""
    start = [min(range(len(u.options)), key=lambda j, u=u: (u.options[j].kept, j)) for u in problem.units]
    held = PointBytes(problem, start)
    for _ in range(PASSES):
        changed = False
        for i, unit in enumerate(problem.units):
            peaks = [held.peak_after(i, j) for j in range(len(unit.options))]
            best = int(np.argmin(peaks))
            if peaks[best] < peaks[held.picks[i]]:
                held.take(i, best)
                changed = True
        if not changed:
            break
    return held.picks
