"""Solve, check by a ghost run, correct the problem, solve again: so that the *real* peak of the plan fits.

A Problem adds up bytes linearly. The check, a ghost run of the very plan, is exact but takes 50 to 250 ms. Its results
shift the base bytes of the points, so that the linear model is exact at that plan and nearly so around it. Plans with
different choices for the output head are not near one another, as logits are the largest tensors and decide how the
allocator's memory is divided. So corrections are kept per choice of the head.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autockpt.schema.choices import Choice
from autockpt.solvers.exact import exact, smallest_peak
from autockpt.solvers.problem import Assignment, Point, Problem, host_of, peak_of, point_values, seconds_of

UnitChoices = Mapping[str, Choice]
Offsets = Mapping[Choice | None, Sequence[int]]  # bytes per point, by the output head's choice
FASTER = 0.002  # share of the step time; smaller gains are not worth a call, and no simulation is that exact
ROUNDS_PER_CALL = 4  # solver runs per allowed call, most of them answered from memory
FAR_OFF = 0.05  # share of the least peak seen: with larger errors the model may overlook every plan that fits


class Checked(NamedTuple):
    """The result of checking a plan.

    ``point_bytes``, where it can say, holds the bytes at each of the problem's points, in their order (None: unseen).
    ``host_bytes`` are those on the host, compared with the problem's ``host_budget`` where it has one. Which of two
    plans is faster is the problem's to say, whose costs a tuner may have scaled.
    """

    peak_bytes: int
    point_bytes: Sequence[int | None] | None = None
    host_bytes: int = 0


Checker = Callable[[UnitChoices], Checked]


@dataclass(frozen=True)
class Refined:
    """The best plan that the check let pass. ``assignment.peak`` and ``feasible`` are the check's, not the model's.

    ``offsets`` (bytes per point) correct the linear model around the plan and may be handed to the next ``refine`` of
    the same graph; by the head's choice.
    """

    assignment: Assignment
    checked: Checked
    offsets: Offsets

    @property
    def choices(self) -> dict[str, Choice]:
        """The choice of every unit."""
        return self.assignment.choices

    @property
    def feasible(self) -> bool:
        """Whether the check found the plan within the budget."""
        return self.assignment.feasible


def refine(
    problem: Problem,
    check: Checker,
    *,
    max_calls: int = 12,
    offsets: Offsets | None = None,
    remembered: MutableMapping[tuple[Choice, ...], Checked] | None = None,
) -> Refined:
    """The fastest plan that fits by the check, with at most ``max_calls`` of these.

    ``remembered`` maps plans (choices in unit order) to checks, is consulted first and added to; share it
    between calls for the same graph. Gains below a share ``FASTER`` of the step time are not looked for. Where the
    check passes no plan, the result is infeasible and holds the leanest plan seen; one call more is spent on the plan
    that keeps least where the model was far off. Raises ValueError for ``max_calls`` < 1.
    """
    if max_calls < 1:
        raise ValueError(f"refine needs at least one check, got max_calls={max_calls}")
    memory = {} if remembered is None else remembered
    search = _Refinement(problem, check, max_calls, dict(offsets or {}), memory)
    search.run()
    return search.result()


@dataclass
class _Refinement:
    problem: Problem
    check: Checker
    limit: int
    offsets: dict[Choice | None, Sequence[int]]
    remembered: MutableMapping[tuple[Choice, ...], Checked]
    calls: int = 0
    best: dict[str, Choice] | None = None
    leanest: dict[str, Choice] | None = None
    host_offset: int = 0  # bytes that the host needs beyond what the problem's own numbers say
    largest_error: int = 0  # bytes by which the corrected model missed a peak

    def run(self) -> None:
        """Solve; where nothing fits, solve again around the plan that keeps least."""
        self._solve_until_settled()
        if self.best is None and self._plan_that_keeps_least_fits():
            self._solve_until_settled()

    def _solve_until_settled(self) -> None:
        """Solve under corrected bytes until the solver has nothing better to propose, or calls run out."""
        for _ in range(ROUNDS_PER_CALL * self.limit):
            proposal = solved(self._within_host(), self.offsets)
            if self.best is not None and not (proposal.feasible and self._is_better(proposal.seconds)):
                return
            checked = self._ask(proposal.choices)
            if checked is None:
                return
            leanest = self.leanest
            fits = self._note(proposal.choices, checked)
            observed = self._observed(proposal.choices, checked)
            if not fits and not proposal.feasible and self.leanest is leanest:
                return  # by the model no plan is leaner than this one, and another one was
            if not fits and proposal.feasible:
                # the stronger of the two corrections puts every plan refused so far out of reach
                observed = tuple(map(max, self._offsets(proposal.choices), observed))
            self.offsets[_head(self.problem, proposal.choices)] = observed
            if not self.problem.fits_host(checked.host_bytes):
                # what the host's pools round up by, which the problem's own numbers do not know
                missed = checked.host_bytes - host_of(self.problem, proposal.choices)
                self.host_offset = max(self.host_offset, missed)

    def _plan_that_keeps_least_fits(self) -> bool:
        """Whether it does where none proposed did, asked only where the model is far off: corrected by what it missed
        of one plan, it may deem all others with that head impossible."""
        assert self.leanest is not None
        if self.largest_error <= FAR_OFF * self._checked(self.leanest).peak_bytes:
            return False
        # fewer bytes on the host: fewer are on their way there at any moment
        order = operator.attrgetter("kept", "host", "backward", "forward")
        plan = {unit.name: min(unit.options, key=order).choice for unit in self.problem.units}
        self.limit = max(self.limit, self.calls + 1)
        checked = self._ask(plan)
        assert checked is not None
        self.offsets[_head(self.problem, plan)] = self._observed(plan, checked)
        return self._note(plan, checked)

    def _offsets(self, plan: UnitChoices) -> Sequence[int]:
        """Corrections of the points' bytes from checks of plans with the same head."""
        return self.offsets.get(_head(self.problem, plan), (0,) * len(self.problem.points))

    def _within_host(self) -> Problem:
        """The problem with its host budget corrected by checks."""
        problem = self.problem
        if problem.host_budget is None or not self.host_offset:
            return problem
        return problem.model_copy(update={"host_budget": max(0, problem.host_budget - self.host_offset)})

    def _key(self, plan: UnitChoices) -> tuple[Choice, ...]:
        return tuple(plan[unit.name] for unit in self.problem.units)

    def _ask(self, plan: UnitChoices) -> Checked | None:
        """Check a plan; None where it was not checked before and no call is left."""
        key = self._key(plan)
        if key not in self.remembered:
            if self.calls >= self.limit:
                return None
            self.calls += 1
            self.remembered[key] = self.check(plan)
        checked = self.remembered[key]
        error = abs(checked.peak_bytes - peak_of(shifted(self.problem, self._offsets(plan)), plan))
        self.largest_error = max(self.largest_error, error)
        return checked

    def _is_better(self, seconds: float) -> bool:
        """Whether that is less than the best plan takes, by as much as is worth a call."""
        worth = FASTER * max(abs(self.problem.base_seconds), 1e-9)
        return self.best is None or seconds < seconds_of(self.problem, self.best) - worth

    def _note(self, plan: UnitChoices, checked: Checked) -> bool:
        """Note a checked plan as best or leanest; True where it fits."""
        if self.leanest is None or self._need(checked) < self._need(self._checked(self.leanest)):
            self.leanest = dict(plan)
        if checked.peak_bytes > self.problem.budget_bytes or not self.problem.fits_host(checked.host_bytes):
            return False
        if self._is_better(seconds_of(self.problem, plan)):
            self.best = dict(plan)
        return True

    def _need(self, checked: Checked) -> tuple[bool, int]:
        """The sort key of plans by leanness: plans within the host budget come before all others."""
        return not self.problem.fits_host(checked.host_bytes), checked.peak_bytes

    def _observed(self, plan: UnitChoices, checked: Checked) -> tuple[int, ...]:
        """Offsets per point that make the linear model agree with the check of a plan."""
        if checked.point_bytes is None:
            error = checked.peak_bytes - peak_of(self.problem, plan)
            return (error,) * len(self.problem.points)
        unseen = self._unseen(checked.peak_bytes, checked.point_bytes)
        linear = point_values(self.problem, plan)
        points = zip(self._offsets(plan), checked.point_bytes, linear, self.problem.points, strict=True)
        return tuple(
            old if seen is None else seen - value + (unseen if _depends(point) else 0)
            for old, seen, value, point in points
        )

    def _unseen(self, peak: int, seen: Sequence[int | None]) -> int:
        """Bytes that no point shows (an allocator's fragmentation), put down to those that choices can change.

        As much as lifts the highest of them to the peak: put down to points that no choice can change, such as the
        optimizer step, they would rule out every other plan as well.
        """
        if peak <= max((v for v in seen if v is not None), default=peak):
            return 0
        at = [v for v, point in zip(seen, self.problem.points, strict=True) if v is not None and _depends(point)]
        return peak - max(at, default=peak)

    def _checked(self, plan: UnitChoices) -> Checked:
        return self.remembered[self._key(plan)]

    def result(self) -> Refined:
        plan = self.best or self.leanest
        assert plan is not None, "the first plan is always checked"
        checked = self._checked(plan)
        assignment = Assignment(
            choices=plan,
            feasible=self.best is not None,
            seconds=seconds_of(self.problem, plan),
            peak=checked.peak_bytes,
        )
        self.offsets[_head(self.problem, plan)] = self._observed(plan, checked)
        return Refined(assignment, checked, self.offsets)


def solved(problem: Problem, offsets: Offsets) -> Assignment:
    """The best plan under bytes corrected by ``offsets``, those of each head for plans with that head."""
    if problem.head is None:
        return exact(shifted(problem, offsets.get(None, ())))
    *others, head = problem.units
    asked = []
    for option in head.options:
        units = (*others, head.model_copy(update={"options": (option,)}))
        asked.append(shifted(problem.model_copy(update={"units": units}), offsets.get(option.choice, ())))
    able = [one for one in asked if smallest_peak(one) <= one.budget_bytes]
    return min(map(exact, able or asked), key=lambda a: (not a.feasible, a.seconds if a.feasible else a.peak))


def _head(problem: Problem, plan: UnitChoices) -> Choice | None:
    return None if problem.head is None else plan[problem.head]


def _depends(point: Point) -> bool:
    """Whether choices change the bytes of a point."""
    return point.own is not None or point.prefix > 0


def shifted(problem: Problem, offsets: Sequence[int]) -> Problem:
    """The problem with bytes added to the base of each of its points."""
    if not any(offsets):
        return problem
    points = tuple(
        p if offset == 0 else Point.model_construct(base=p.base + offset, prefix=p.prefix, own=p.own, phase=p.phase)
        for p, offset in zip(problem.points, offsets, strict=True)
    )
    return problem.model_copy(update={"points": points})
