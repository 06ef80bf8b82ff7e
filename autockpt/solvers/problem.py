"""The planning problem as solvers see it, in numbers only.

Choose one option per unit, so that the extra seconds are least and no point of the step exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Literal

from pydantic import Field

from autockpt.schema.base import Data
from autockpt.schema.choices import Choice


class Option(Data):
    """One choice on one unit. Bytes are counted above what the step holds when the unit keeps nothing at all."""

    choice: Choice
    seconds: float = Field(description="extra step time over `save`; may be negative through noise, never for `save`")
    kept: int = Field(description="bytes alive from the end of the unit's forward to the start of its backward")
    forward: int = Field(description="peak bytes of its own while the unit's forward runs")
    backward: int = Field(description="peak bytes of its own while the unit's backward (recompute included) runs")
    host: int = Field(default=0, description="bytes that it moves to the host, where all units' lie at once")


class UnitOptions(Data):
    """A unit and what may be chosen for it."""

    name: str
    options: tuple[Option, ...] = Field(min_length=1)


class Point(Data):
    """A moment of the step.

    Its bytes are ``base`` + the ``kept`` bytes of units[0:prefix] + what unit ``own`` needs now.
    """

    base: int
    prefix: int
    own: int | None = Field(default=None, description="index of the unit that runs now, not counted in the prefix")
    phase: Literal["forward", "backward"] | None = None


class Problem(Data):
    """Choose one option per unit: least seconds with every point's bytes within ``budget_bytes``.

    ``units`` stand in order of execution. A problem is a linear bound, exact where costs add up; the ghost run of the
    resulting plan has the last word on bytes.
    """

    units: tuple[UnitOptions, ...]
    points: tuple[Point, ...]
    budget_bytes: int = Field(description="what a device's own overhead leaves of its budget")
    host_budget: int | None = Field(default=None, description="most bytes of all units together on the host")
    head: str | None = Field(default=None, description="the output head, where it is among the units: the last of them")
    base_seconds: float = Field(default=0.0, description="step time when every unit saves everything")

    def fits_host(self, host_bytes: int) -> bool:
        """Whether so many bytes on the host are within its budget, if there is one."""
        return self.host_budget is None or host_bytes <= self.host_budget


class Assignment(Data):
    """A solver's answer. ``feasible`` False means no choice of options fits; ``peak`` is then the least there is."""

    choices: dict[str, Choice]
    feasible: bool
    seconds: float = Field(description="extra seconds over save-everything, by the problem's own numbers")
    peak: int = Field(description="bytes, by the problem's own numbers")


def option_of(unit: UnitOptions, choice: Choice) -> Option:
    """The option that stands for a choice. Raises KeyError where the unit does not offer it."""
    for option in unit.options:
        if option.choice == choice:
            return option
    raise KeyError(f"{unit.name} does not offer {choice}")


def peak_of(problem: Problem, choices: Mapping[str, Choice]) -> int:
    """Peak bytes of an assignment by the problem's own numbers. Every unit must be named."""
    return max([0, *point_values(problem, choices)])


def point_values(problem: Problem, choices: Mapping[str, Choice]) -> list[int]:
    """Bytes at each of the problem's points under an assignment, by the problem's own numbers."""
    picked = [option_of(u, choices[u.name]) for u in problem.units]
    prefix = list(accumulate((option.kept for option in picked), initial=0))
    values = []
    for p in problem.points:
        own = 0 if p.own is None else (picked[p.own].forward if p.phase == "forward" else picked[p.own].backward)
        values.append(p.base + prefix[p.prefix] + own)
    return values


def host_of(problem: Problem, choices: Mapping[str, Choice]) -> int:
    """Bytes on the host under an assignment by the problem's own numbers."""
    return sum(option_of(u, choices[u.name]).host for u in problem.units)


def seconds_of(problem: Problem, choices: Mapping[str, Choice]) -> float:
    """Extra seconds of an assignment over save-everything."""
    return sum(option_of(u, choices[u.name]).seconds for u in problem.units)
