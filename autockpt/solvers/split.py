"""Split plans: one choice on the first layers, another one on the rest.

People write such plans by hand ("offload the first six layers") and review them at a glance, and compiled layers need
fewer graphs. There are so few of them that every pair of choices is evaluated at every split, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self

import numpy as np

from autockpt.schema.choices import Choice
from autockpt.solvers.exact import strongest
from autockpt.solvers.problem import Assignment, Option, Point, Problem, UnitOptions
from autockpt.solvers.refine import Checker

Accept = Callable[[Choice, Choice], bool]
"""Whether a pair of choices, of the first and of the last layers, is wanted."""


def split_plans(problem: Problem, accept: Accept = lambda front, back: True) -> list[Assignment]:
    """The fastest plan within the budgets for every accepted pair of choices, fastest first.

    A layer that does not offer a choice saves. Each option of an output head is tried. Uniform plans are among them.
    """
    layers = [unit for unit in problem.units if unit.name != problem.head]
    choices = list(dict.fromkeys(option.choice for unit in layers for option in unit.options))
    points = strongest(problem.points)
    found: dict[tuple[Choice, ...], Assignment] = {}
    for head in [()] if problem.head is None else [(option,) for option in problem.units[-1].options]:
        plans = {
            choice: _Uniform.of([*(_option(unit, choice) for unit in layers), *head], points) for choice in choices
        }
        for front, back in product(choices, repeat=2):
            if accept(front, back) and (best := _best_split(problem, len(layers), points, plans[front], plans[back])):
                found.setdefault(tuple(best.choices.values()), best)
    return sorted(found.values(), key=lambda plan: (plan.seconds, plan.peak))


def refine_split(
    problem: Problem,
    check: Checker,
    accept: Accept = lambda front, back: True,
    *,
    max_calls: int = 4,
    below: float = math.inf,
) -> Assignment | None:
    """The fastest split plan that fits by ``check`` (a ghost run), with at most ``max_calls`` of these.

    Each check shifts the budget by what the linear model missed. ``peak`` of the result is the check's. None where no
    plan passed. Plans of ``below`` seconds and more, by the numbers as corrected so far, are not
    checked.
    """
    best: Assignment | None = None
    missed, seen = 0, set[tuple[Choice, ...]]()
    for _ in range(max_calls):
        plans = split_plans(problem.model_copy(update={"budget_bytes": problem.budget_bytes - missed}), accept)
        if not plans or plans[0].seconds >= below:
            break
        plan = plans[0]
        key = tuple(plan.choices.values())
        if key in seen:
            break
        seen.add(key)
        checked = check(plan.choices)
        missed = checked.peak_bytes - plan.peak
        if checked.peak_bytes <= problem.budget_bytes and problem.fits_host(checked.host_bytes):
            best, below = plan.model_copy(update={"peak": checked.peak_bytes}), plan.seconds
    return best


@dataclass(frozen=True)
class _Uniform:
    """One choice on all layers, with a choice for the output head.

    ``needs`` are bytes by point, ``kept``, ``host`` and ``seconds`` sums over the units before each one.
    """

    options: Sequence[Option]
    kept: np.ndarray
    host: np.ndarray
    seconds: np.ndarray
    needs: np.ndarray

    @classmethod
    def of(cls, options: Sequence[Option], points: Sequence[Point]) -> Self:
        names = "kept", "host", "seconds"
        kept, host, seconds = (np.cumsum([0, *(getattr(o, name) for o in options)]) for name in names)
        own = (None if p.own is None else options[p.own] for p in points)
        needs = [
            0 if o is None else o.forward if p.phase == "forward" else o.backward
            for o, p in zip(own, points, strict=True)
        ]
        return cls(options, kept, host, seconds, np.array(needs, dtype=np.int64))


def _best_split(
    problem: Problem, layers: int, points: Sequence[Point], front: _Uniform, back: _Uniform
) -> Assignment | None:
    """The fastest plan within the budgets in which the first layers are as in ``front``, the others as in ``back``."""
    counts = np.arange(layers + 1)
    prefix = np.array([p.prefix for p in points], dtype=np.int64)
    own = np.array([-1 if p.own is None else p.own for p in points], dtype=np.int64)
    split = np.minimum(prefix, counts[:, None])
    bytes_ = np.array([p.base for p in points], dtype=np.int64) + front.kept[split]
    bytes_ = bytes_ + back.kept[prefix] - back.kept[split] + np.where(own < counts[:, None], front.needs, back.needs)
    peaks = np.maximum(bytes_.max(axis=1, initial=0), 0)
    both = (front.seconds, back.seconds), (front.host, back.host)
    seconds, host = (ours[counts] + theirs[-1] - theirs[counts] for ours, theirs in both)
    fits = peaks <= problem.budget_bytes
    if problem.host_budget is not None:
        fits &= host <= problem.host_budget
    if not fits.any():
        return None
    count = int(np.lexsort((peaks, np.where(fits, seconds, np.inf)))[0])
    options = [*front.options[:count], *back.options[count:]]
    return Assignment(
        choices={unit.name: option.choice for unit, option in zip(problem.units, options, strict=True)},
        feasible=True,
        seconds=float(seconds[count]),
        peak=int(peaks[count]),
    )


def _option(unit: UnitOptions, choice: Choice) -> Option:
    """The option of a choice; of a layer that does not offer it, its first one, which saves."""
    return next((option for option in unit.options if option.choice == choice), unit.options[0])
