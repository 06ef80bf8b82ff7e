"""The plans every user knows, as plain functions Problem -> Assignment. None of them looks at the budget."""

from __future__ import annotations

import math

from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice
from autockpt.schema.problem import Assignment, Problem
from autockpt.solvers.answer import judge


def uniform(problem: Problem, choice: Choice, *, method: str | None = None) -> Assignment:
    """The same choice on every unit; a unit that does not offer it saves everything."""
    return _mark(problem, set(range(len(problem.units))), choice, method or f"{choice} all")


def none(problem: Problem) -> Assignment:
    """Every unit saves everything: plain training."""
    return uniform(problem, SAVE, method="none")


def recompute_all(problem: Problem) -> Assignment:
    """Every unit is recomputed, as a Trainer's ``gradient_checkpointing=True`` does."""
    return uniform(problem, RECOMPUTE, method="recompute all")


def offload_all(problem: Problem) -> Assignment:
    """Every unit's saved tensors are moved off the device."""
    return uniform(problem, OFFLOAD, method="offload all")


def every_nth(problem: Problem, n: int, choice: Choice = RECOMPUTE) -> Assignment:
    """Units 0, n, 2n, … get ``choice``, the others save; ``n`` 1 is all of them. Raises ValueError for n < 1."""
    if n < 1:
        raise ValueError(f"every_nth needs n >= 1, got {n}")
    return _mark(problem, set(range(0, len(problem.units), n)), choice, f"every-{n}")


def first_k(problem: Problem, k: int, choice: Choice = RECOMPUTE) -> Assignment:
    """The first ``k`` units get ``choice``, the others save. Raises ValueError for k outside 0..units."""
    if not 0 <= k <= len(problem.units):
        raise ValueError(f"first_k needs 0 <= k <= {len(problem.units)}, got {k}")
    return _mark(problem, set(range(k)), choice, f"first-{k}")


def chen_sqrt(problem: Problem, choice: Choice = RECOMPUTE) -> Assignment:
    """About √n units are kept, evenly spread and ending with the last; the rest are recomputed.

    The rule of Chen et al. 2016 (arXiv:1604.06174), carried over to choices per unit: their √n segment borders are the
    places where activations stay.
    """
    n = len(problem.units)
    segments = max(1, math.isqrt(n))
    saved = {round((s + 1) * n / segments) - 1 for s in range(segments)}
    return _mark(problem, set(range(n)) - saved, choice, "chen √n")


def _mark(problem: Problem, marked: set[int], choice: Choice, method: str) -> Assignment:
    choices: dict[str, Choice] = {}
    for index, unit in enumerate(problem.units):
        offered = [option.choice for option in unit.options]
        wanted = choice if index in marked and choice in offered else SAVE
        if wanted not in offered:
            raise KeyError(f"{unit.name} offers neither {choice} nor {SAVE}")
        choices[unit.name] = wanted
    return judge(problem, choices, method=method)
