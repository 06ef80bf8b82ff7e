"""The exact mixed-integer linear program, by the HiGHS solver that scipy ships.

One binary variable per unit and option; the bytes kept so far are a chain of continuous variables, so that the matrix
stays sparse however many points there are. Where swapping two neighbouring identical units provably never harms, the
plans that differ only by such swaps are cut off, or hundreds of equal units would keep the solver branching for ever.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import scipy

from autockpt.schema.problem import Assignment, Option, Problem, UnitOptions
from autockpt.solvers.answer import host_excess, judge, relative_gap
from autockpt.solvers.chain import as_chain, needs, own_bytes, strongest
from autockpt.solvers.labels import labels

# Largest byte coefficient after scaling: HiGHS' absolute tolerance of 1e-6 is then below a byte at 100 GB.
LARGEST = 1e5
SECONDS = 1e3  # the step time after scaling, which keeps HiGHS' absolute gap of 1e-6 negligible
ROUNDING_TRIES = 5


def milp(problem: Problem, *, time_limit: float = 10.0, gap: float = 1e-4) -> Assignment:
    """The fastest assignment within the budget, within ``gap`` (share of the step time) of the optimum.

    ``time_limit`` in seconds. The result's ``gap`` is what was proven when the solver stopped; its peak is recomputed
    in integers, so that rounding in the solver never breaks the budget. Where nothing fits, the result is infeasible
    and holds an assignment of smallest peak. Should the solver stop without any plan, one that moves nothing to the
    host is returned. Raises ValueError where the problem is not a chain.
    """
    deadline = time.monotonic() + time_limit
    if as_chain(problem).reach[0] < 0 and problem.host_budget is None:
        return labels(problem, time_limit=time_limit)
    model, less, proven = _Model(problem), 0, -math.inf
    for attempt in range(ROUNDING_TRIES):
        remaining = max(0.1, deadline - time.monotonic())
        picks, bound, infeasible = model.fastest(problem.budget_bytes - less, remaining, gap)
        if attempt == 0:
            proven = bound  # later attempts solve a tighter problem, whose bound proves nothing about this one
            if infeasible:
                picks = model.leanest(remaining)
                if picks is None:
                    return _fallback(problem)
                return judge(problem, picks).model_copy(update={"feasible": False})
        if picks is None:
            break
        answer = judge(problem, picks)
        if answer.feasible:
            return answer.model_copy(update={"gap": relative_gap(problem, answer.seconds, proven)})
        if answer.peak > problem.budget_bytes:
            less += max(answer.peak - problem.budget_bytes, model.tolerance * 100**attempt)
        model.host_less += max(0, host_excess(problem, answer.choices))
    return _fallback(problem)


def _fallback(problem: Problem) -> Assignment:
    """The plan that moves nothing to the host, by label setting, which knows nothing of that and takes no time."""
    units = tuple(
        unit.model_copy(update={"options": tuple(o for o in unit.options if not o.host) or unit.options})
        for unit in problem.units
    )
    answer = labels(problem.model_copy(update={"units": units}), time_limit=0.0)
    fastest = sum(min(o.seconds for o in unit.options) for unit in problem.units)
    return answer.model_copy(update={"gap": relative_gap(problem, answer.seconds, fastest)})


@dataclass
class _Rows:
    """Rows of a sparse constraint matrix, collected one by one."""

    terms: list[tuple[int, int, float]] = field(default_factory=list)  # row, column, coefficient
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def add(self, terms: list[tuple[int, float]], low: float, high: float) -> None:
        self.terms += [(len(self.low), column, value) for column, value in terms]
        self.low.append(low)
        self.high.append(high)

    def constraint(self, columns: int) -> scipy.optimize.LinearConstraint:
        row, column, value = zip(*self.terms, strict=True)
        matrix = scipy.sparse.csr_array((value, (row, column)), shape=(len(self.low), columns))
        return scipy.optimize.LinearConstraint(matrix, np.array(self.low), np.array(self.high))  # type: ignore[arg-type]


class _Model:
    """Variables: one binary per live option, then the bytes kept before each unit and at the end, the peak, the host's.

    ``host_less`` bytes of the host budget are left free.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.live = [_undominated(unit, problem.host_budget is not None) for unit in problem.units]
        sizes = [len(picks) for picks in self.live]
        self.first = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self.kept = self.first[-1]
        self.peak = self.kept + len(problem.units) + 1
        self.host, self.host_less = self.peak + 1, 0
        self.columns = self.peak + 3  # the last one is the constant 1 that carries the base step time
        coefficients = [abs(v) for u in problem.units for o in u.options for v in (o.kept, o.forward, o.backward)]
        self.scale = LARGEST / max([1, *coefficients])
        self.host_scale = LARGEST / max([1, *(o.host for u in problem.units for o in u.options)])
        self.tolerance = math.ceil(1e-6 / self.scale)  # bytes by which HiGHS may overstep a row, at the least
        self.points = strongest(problem.points)
        self.structure = self._structure()

    def options(self, i: int) -> list[tuple[int, Option]]:
        """Columns and options of a unit that are worth choosing."""
        return [(self.first[i] + k, self.problem.units[i].options[pick]) for k, pick in enumerate(self.live[i])]

    def _structure(self) -> _Rows:
        rows = _Rows()
        for i in range(len(self.problem.units)):
            rows.add([(column, 1.0) for column, _ in self.options(i)], 1.0, 1.0)
            chain = [(column, o.kept * self.scale) for column, o in self.options(i) if o.kept]
            rows.add([(self.kept + i, 1.0), (self.kept + i + 1, -1.0), *chain], 0.0, 0.0)
        everything = [pair for i in range(len(self.problem.units)) for pair in self.options(i)]
        hosted = [(column, o.host * self.host_scale) for column, o in everything if o.host]
        rows.add([(self.host, -1.0), *hosted], 0.0, 0.0)
        reference = max([0, *(p.base for p in self.points)])
        for p in self.points:
            own = [] if p.own is None else self.options(p.own)
            terms = [(self.kept + p.prefix, 1.0), (self.peak, -1.0)]
            terms += [(column, own_bytes(o, p) * self.scale) for column, o in own]
            rows.add(terms, -math.inf, (reference - p.base) * self.scale)
        self.reference = reference
        self._order_identical_neighbours(rows)
        return rows

    def _order_identical_neighbours(self, rows: _Rows) -> None:
        """Forbid, between identical neighbours, the order that keeps more bytes earlier, wherever the swap is safe.

        With option a before b and a keeping more, all bytes that the pair needs are judged at once: if the most bytes
        needed after the swap do not exceed those needed before it, every plan has an equal or better one in the other
        order (each swap moves kept bytes later, so swapping ends).
        """
        own, _ = needs(self.problem)
        for i in range(len(self.problem.units) - 1):
            if self.problem.units[i].options != self.problem.units[i + 1].options:
                continue
            here, there = self.options(i), self.options(i + 1)
            barred: dict[int, list[int]] = {}
            complete = True
            for (column, a), k in zip(here, self.live[i], strict=True):
                for (other, b), m in zip(there, self.live[i + 1], strict=True):
                    if a.kept <= b.kept:
                        continue
                    before = max(own[i][k], a.kept + own[i + 1][m])
                    after = max(own[i][m], b.kept + own[i + 1][k])
                    if after <= before:
                        barred.setdefault(column, []).append(other)
                    else:
                        complete = False
            if complete:
                self._order_completely(rows, here, there)
            else:
                for column, others in barred.items():
                    rows.add([(column, 1.0), *((other, 1.0) for other in others)], -math.inf, 1.0)

    @staticmethod
    def _order_completely(rows: _Rows, here: list[tuple[int, Option]], there: list[tuple[int, Option]]) -> None:
        for level in sorted({o.kept for _, o in here})[1:]:
            more_here = [(column, 1.0) for column, o in here if o.kept >= level]
            more_there = [(column, -1.0) for column, o in there if o.kept >= level]
            rows.add(more_here + more_there, -math.inf, 0.0)

    def fastest(self, budget_bytes: int, time_limit: float, gap: float) -> tuple[list[int] | None, float, bool]:
        """Option indices of the fastest assignment, a lower bound on its extra seconds, and whether none exists."""
        dearest = max([abs(o.seconds) for u in self.problem.units for o in u.options], default=0.0)
        total = abs(self.problem.base_seconds) + dearest or 1.0
        cost = np.zeros(self.columns)
        for i in range(len(self.problem.units)):
            for column, option in self.options(i):
                cost[column] = option.seconds * SECONDS / total
        cost[-1] = self.problem.base_seconds * SECONDS / total
        result = self._solve(cost, (budget_bytes - self.reference) * self.scale, time_limit, gap)
        bound = getattr(result, "mip_dual_bound", None)
        seconds = -math.inf if bound is None else float(bound) * total / SECONDS - self.problem.base_seconds
        return self._picks(result), seconds, result.status == 2

    def leanest(self, time_limit: float) -> list[int] | None:
        """Option indices of an assignment of least peak, within the solver's tolerance; None when time ran out."""
        cost = np.zeros(self.columns)
        cost[self.peak] = 1.0
        result = self._solve(cost, math.inf, time_limit, 0.0)
        return self._picks(result)

    def _solve(
        self, cost: np.ndarray, highest_peak: float, time_limit: float, gap: float
    ) -> scipy.optimize.OptimizeResult:
        low, high = np.full(self.columns, -math.inf), np.full(self.columns, math.inf)
        low[: self.kept], high[: self.kept] = 0.0, 1.0
        low[self.kept] = high[self.kept] = 0.0
        high[self.peak] = highest_peak
        if self.problem.host_budget is not None:
            high[self.host] = max(0, self.problem.host_budget - self.host_less) * self.host_scale
        if math.isfinite(highest_peak):
            low[self.peak] = highest_peak  # the peak is free to be the budget itself: one column less to branch around
        low[-1] = high[-1] = 1.0
        integral = np.zeros(self.columns)
        integral[: self.kept] = 1
        # HiGHS' presolve rarely ends in an internal error (status 4), branching does not
        for presolve in (True, False):
            with _unprinted():
                result = scipy.optimize.milp(
                    cost,
                    integrality=integral,
                    bounds=scipy.optimize.Bounds(low, high),  # type: ignore[arg-type]
                    constraints=self.structure.constraint(self.columns),
                    options={"time_limit": time_limit, "mip_rel_gap": gap, "presolve": presolve},
                )
            if result.status != 4:
                break
        return result

    def _picks(self, result: scipy.optimize.OptimizeResult) -> list[int] | None:
        if result.x is None:
            return None
        x = np.asarray(result.x)
        return [live[int(np.argmax(x[self.first[i] : self.first[i + 1]]))] for i, live in enumerate(self.live)]


@contextmanager
def _unprinted() -> Iterator[None]:
    """Without what C code prints to standard output: HiGHS now and then does (``HighsMipSolverData::…``), whatever it
    is told, and answers go there."""
    flush = ctypes.CDLL(None).fflush
    flush(None)
    try:
        output = os.dup(1)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(output, 1)
        os.close(output)


def _undominated(unit: UnitOptions, host: bool) -> list[int]:
    """Indices of a unit's options that no other beats in seconds and all bytes alike, with ``host`` those there too."""
    alive: list[int] = []
    costs = [(o.seconds, o.kept, o.forward, o.backward, o.host if host else 0) for o in unit.options]
    for j in sorted(range(len(costs)), key=lambda j: costs[j]):
        if not any(all(a <= b for a, b in zip(costs[k], costs[j], strict=True)) for k in alive):
            alive.append(j)
    return alive
