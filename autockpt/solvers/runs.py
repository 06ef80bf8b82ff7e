"""Plans in two runs of layers: the first ``count`` make one choice, the others another.

People write such plans by hand ("offload the first six layers"), review them at a glance, and a compiler sees few kinds
of layers. There are few enough of them that every pair of choices is evaluated at every split, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from autockpt.schema.choices import SAVE, Choice
from autockpt.schema.problem import Assignment, Option, Problem, UnitOptions
from autockpt.solvers.chain import strongest
from autockpt.solvers.refine import Checker

Accept = Callable[[Choice, Choice], bool]
"""Whether a pair of choices, of the first and of the last layers, is wanted."""


def rest_saves(front: Choice, back: Choice) -> bool:
    """Whether one of the two runs saves everything."""
    return SAVE in (front, back)


def two_runs(problem: Problem, accept: Accept = lambda front, back: True) -> list[Assignment]:
    """The fastest plan within the budgets for every accepted pair of choices, fastest first.

    A layer that does not offer a choice saves. An output head takes each of its options in turn. Plans that one choice
    on all layers makes are among them.
    """
    found: dict[tuple[Choice, ...], Assignment] = {}
    for chain in _chains(problem):
        for front in range(len(chain.choices)):
            for back in range(len(chain.choices)):
                if accept(chain.choices[front], chain.choices[back]):
                    best = chain.best(front, back, problem)
                    if best is not None:
                        found.setdefault(tuple(best.choices.values()), best)
    return sorted(found.values(), key=lambda plan: (plan.seconds, plan.peak))


def refine_two_runs(
    problem: Problem, check: Checker, accept: Accept = lambda front, back: True, *, max_calls: int = 4
) -> Assignment | None:
    """The fastest plan in two runs that fits by ``check`` (a ghost run), with at most ``max_calls`` of these.

    Each check shifts the budget by what the linear model missed. ``peak`` of the result is the check's. None where no
    plan passed.
    """
    best: Assignment | None = None
    missed, seen = 0, set[tuple[Choice, ...]]()
    for _ in range(max_calls):
        plans = two_runs(problem.model_copy(update={"budget_bytes": problem.budget_bytes - missed}), accept)
        if not plans or (best is not None and plans[0].seconds >= best.seconds):
            break
        plan = plans[0]
        key = tuple(plan.choices.values())
        if key in seen:
            break
        seen.add(key)
        checked = check(plan.choices)
        missed = checked.peak_bytes - plan.peak
        host = problem.host_budget
        if checked.peak_bytes <= problem.budget_bytes and (host is None or checked.host_bytes <= host):
            best = plan.model_copy(update={"peak": checked.peak_bytes})
    return best


@dataclass(frozen=True)
class _Chain:
    """The layers of a problem as arrays, its output head fixed. Rows are choices, columns are layers."""

    choices: list[Choice]
    names: list[str]
    options: list[list[Option]]
    kept: np.ndarray
    host: np.ndarray
    seconds: np.ndarray
    base: np.ndarray  # bytes by point, those of the head included
    prefix: np.ndarray
    own: np.ndarray  # the layer that runs at a point; -1: none
    needs: np.ndarray  # bytes that it needs then, by choice and point
    head: Mapping[str, Choice]
    head_option: Option | None

    def best(self, front: int, back: int, problem: Problem) -> Assignment | None:
        """The fastest split that fits the budgets."""
        counts = np.arange(len(self.names) + 1)[:, None]
        split = np.minimum(self.prefix, counts)
        bytes_ = self.base + _sums(self.kept[front])[split]
        bytes_ = bytes_ + (_sums(self.kept[back])[self.prefix] - _sums(self.kept[back])[split])
        bytes_ = bytes_ + np.where(self.own < counts, self.needs[front], self.needs[back])
        peaks = np.maximum(bytes_.max(axis=1, initial=0), 0)
        seconds, host = (_at_splits(values[front], values[back]) for values in (self.seconds, self.host))
        if self.head_option is not None:
            seconds, host = seconds + self.head_option.seconds, host + self.head_option.host
        fits = peaks <= problem.budget_bytes
        if problem.host_budget is not None:
            fits &= host <= problem.host_budget
        if not fits.any():
            return None
        count = int(np.lexsort((peaks, np.where(fits, seconds, np.inf)))[0])
        rows = [front if i < count else back for i in range(len(self.names))]
        layers = {name: self.options[row][i].choice for i, (name, row) in enumerate(zip(self.names, rows, strict=True))}
        return Assignment(
            choices={**layers, **self.head}, feasible=True, seconds=float(seconds[count]), peak=int(peaks[count])
        )


def _chains(problem: Problem) -> Iterable[_Chain]:
    """The problem with each of the head's options; without a head, once."""
    layers = [unit for unit in problem.units if unit.name != problem.head]
    choices = list(dict.fromkeys(option.choice for unit in layers for option in unit.options))
    options = [[_option(unit, choice) for unit in layers] for choice in choices]
    heads = [None] if problem.head is None else list(problem.units[-1].options)
    points = strongest(problem.points)
    at_head = len(layers)
    own = np.array([-1 if p.own is None or p.own == at_head else p.own for p in points], dtype=np.int64)

    def rows(name: str) -> np.ndarray:
        return np.array([[getattr(option, name) for option in row] for row in options])

    forward, backward = rows("forward"), rows("backward")
    phases = np.array([p.phase == "forward" for p in points])
    needs = np.where(own < 0, 0, np.where(phases, forward[:, own], backward[:, own]))
    prefix = np.array([min(p.prefix, at_head) for p in points], dtype=np.int64)
    kept, host, seconds = rows("kept"), rows("host"), rows("seconds")
    for head in heads:
        base = [
            p.base
            + (head.kept if head is not None and p.prefix > at_head else 0)
            + (0 if head is None or p.own != at_head else head.forward if p.phase == "forward" else head.backward)
            for p in points
        ]
        yield _Chain(
            choices=choices,
            names=[unit.name for unit in layers],
            options=options,
            kept=kept,
            host=host,
            seconds=seconds,
            base=np.array(base, dtype=np.int64),
            prefix=prefix,
            own=own,
            needs=needs,
            head={} if head is None or problem.head is None else {problem.head: head.choice},
            head_option=head,
        )


def _option(unit: UnitOptions, choice: Choice) -> Option:
    """The option of a choice; of a layer that does not offer it, its first one, which saves."""
    return next((option for option in unit.options if option.choice == choice), unit.options[0])


def _sums(values: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(values)])


def _at_splits(front: np.ndarray, back: np.ndarray) -> np.ndarray:
    """Sums over all layers for each number of layers that take ``front``."""
    return _sums(front) + _sums(back)[-1] - _sums(back)
