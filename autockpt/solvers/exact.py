"""The exact solver: label setting along the chain of units, which is fast where many units are equal.

Walking along the units, a partial plan is a *label* (bytes kept so far, bytes on the host so far, extra seconds so
far). Of two labels the one with no more of each can be completed at least as well, so the other is dropped: identical
units, whose plans a branching solver tells apart, collapse into the same labels. A linear relaxation of the remaining
units bounds what a label can still become and drops those that cannot beat the best plan known. (Dynamic programming
with dominance and bounds for the multiple-choice knapsack problem: Kellerer, Pferschy, Pisinger, "Knapsack Problems",
2004, ch. 11; here with a capacity at every place of the chain instead of one at its end.)

Where a host budget binds, bytes on the host are first given a price in seconds (Lagrangian relaxation): the best price
gives a good plan and a bound on all others, between which few labels are left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autockpt.solvers.problem import Assignment, Point, Problem, host_of, peak_of, seconds_of

WIDTHS = (64, 4096, 65536)  # labels kept per unit in successive passes; the first pass finds a good plan to bound by
HOST_LEVELS = 8  # numbers of bytes on the host that labels are compared at
COARSE = 100  # times as far from the optimum as the result may be plans by which the price is found
ROUNDING = 1e-12  # share of the largest number that sums of a few hundred floats may err by
INFINITE_BYTES = 1 << 60
ROUNDS, SOLVING = 8, 2.0  # bisections of the budget, to 0.4 % of the range, and seconds of each


def leanest(problem: Problem, seconds: float) -> Assignment | None:
    """The assignment of least peak that takes at most ``seconds`` over saving everything; None where none fits.

    By bisection of the budget, ``SOLVING`` seconds at most for each.
    """
    low, high = smallest_peak(problem), problem.budget_bytes
    found = None
    for _ in range(1 + ROUNDS):
        budget_bytes = high if found is None else (low + high) // 2
        answer = exact(problem.model_copy(update={"budget_bytes": budget_bytes}), time_limit=SOLVING)
        if answer.feasible and answer.seconds <= seconds:
            found, high = answer, min(budget_bytes, answer.peak)
        elif found is None:
            return None
        else:
            low = budget_bytes
    return found


def exact(problem: Problem, *, time_limit: float = 10.0, gap: float = 1e-6) -> Assignment:
    """The fastest assignment within the budgets, proven to be within ``gap`` (a share of the step time) of the optimum.

    ``time_limit`` in seconds ends the proof early. Where nothing fits, the result is infeasible and holds the
    fastest assignment of smallest peak within the host budget. Raises ValueError where the problem is not a chain.
    """
    deadline = time.monotonic() + time_limit
    chain, slack = as_chain(problem), gap * abs(problem.base_seconds)
    best = _fastest(chain, deadline, slack) if chain.reach[0] >= 0 else None
    if best is None:
        chain = as_chain(problem.model_copy(update={"budget_bytes": _smallest_peak_within_host(problem, deadline)}))
        deadline = time.monotonic() + time_limit
        best = _fastest(chain, deadline, slack) or _fewest_on_host(chain, deadline)
    choices = {
        unit.name: unit.options[int(mine.picks[place])].choice
        for unit, mine, place in zip(problem.units, chain.units, best.places, strict=True)
    }
    peak = peak_of(problem, choices)
    feasible = peak <= problem.budget_bytes and problem.fits_host(host_of(problem, choices))
    return Assignment(choices=choices, feasible=feasible, seconds=seconds_of(problem, choices), peak=peak)


def _smallest_peak_within_host(problem: Problem, deadline: float) -> int:
    """The least peak of any assignment within the host budget, to the byte."""
    lowest = smallest_peak(problem)
    chain = as_chain(problem.model_copy(update={"budget_bytes": lowest}))
    if _fewest_on_host(chain, deadline).host <= chain.host:
        return lowest
    choices = {unit.name: min(unit.options, key=lambda option: option.host).choice for unit in problem.units}
    highest = peak_of(problem, choices)
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        chain = as_chain(problem.model_copy(update={"budget_bytes": middle}))
        if _fewest_on_host(chain, deadline).host <= chain.host:
            highest = middle
        else:
            lowest = middle
    return highest


@dataclass(frozen=True)
class _Plan:
    """A plan along a chain: the place of each unit's option among those of the chain, and what is known of it.

    ``bound``: no plan takes fewer seconds than this, or than the plan itself.
    """

    places: list[int]
    seconds: float
    host: int
    bound: float


def _fastest(chain: Chain, deadline: float, slack: float) -> _Plan | None:
    """The fastest plan within both budgets; None where the host's leaves none."""
    fast = _unbounded(chain, deadline, slack)
    if fast.host <= chain.host:
        return fast
    lean = _fewest_on_host(chain, deadline)
    if lean.host > chain.host:
        return None
    bound, price, coarse = fast.bound, 0.0, COARSE * slack
    while time.monotonic() < deadline and lean.seconds - max(bound, fast.seconds) > slack:
        # the price at which both plans cost the same; where no third one costs less, it gives the best bound
        asked = (lean.seconds - fast.seconds) / (fast.host - lean.host)
        found = _unbounded(chain, deadline, coarse, asked)
        if (least := found.bound - asked * chain.host) > bound:
            bound, price = least, asked
        cost = lean.seconds + asked * lean.host
        if found.seconds + asked * found.host >= cost - coarse - ROUNDING * abs(cost):
            break
        fast, lean = (found, lean) if found.host > chain.host else (fast, found)
    return _Search(chain, deadline, slack, price, lean.places, lean.seconds, bound).run()


def _unbounded(chain: Chain, deadline: float, slack: float, price: float = 0.0) -> _Plan:
    """The cheapest plan where a byte on the host costs ``price`` seconds and any number of them is allowed.

    ``bound`` is of what plans cost.
    """
    plan = _Search(chain.priced(price), deadline, slack).run()
    return _Plan(plan.places, *chain.sums(plan.places), min(plan.bound, plan.seconds))


def _fewest_on_host(chain: Chain, deadline: float) -> _Plan:
    """The plan with the fewest bytes on the host."""
    plan = _Search(chain.with_seconds(lambda unit: unit.host.astype(float)), deadline, 0.0).run()
    return _Plan(plan.places, *chain.sums(plan.places), plan.bound)


@dataclass
class _Search:
    chain: Chain
    deadline: float
    slack: float  # seconds that the result may be from the optimum
    price: float = 0.0  # seconds per byte on the host, by which labels are bounded
    places: list[int] = field(default_factory=list)  # of the best plan
    best: float = np.inf
    bound: float = -np.inf  # no plan is faster than this or ``best``
    truncated: bool = False

    def __post_init__(self) -> None:
        self.rest = _relaxations(self.chain.priced(self.price))
        self.bound = max(self.bound, float(self._bound(0, np.zeros(1), np.zeros(1))[0]))
        least = [int(unit.host.min()) for unit in self.chain.units]
        self.room = [self.chain.host - sum(least[i:]) for i in range(len(least) + 1)]

    def run(self) -> _Plan:
        """The best plan, by passes of growing width until it is proven or the time is over."""
        for width in WIDTHS:
            self.walk(width)
            if not self.truncated or self.best - self.bound <= self.slack or time.monotonic() > self.deadline:
                break
        return _Plan(self.places, self.best, self.chain.sums(self.places)[1], self.bound)

    def walk(self, width: int) -> None:
        """One pass along the chain with at most ``width`` labels per unit; updates ``best`` and ``bound``."""
        kept, host, seconds = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1)
        trail: list[tuple[np.ndarray, np.ndarray]] = []
        dropped = np.inf  # least bound of all labels given up although they might have won
        self.truncated = False
        for i, unit in enumerate(self.chain.units):
            parent, option = _extended(unit, int(self.chain.reach[i + 1]), kept)
            kept, host = kept[parent] + unit.kept[option], host[parent] + unit.host[option]
            seconds = seconds[parent] + unit.seconds[option]
            bound = seconds + self._bound(i + 1, kept, host)
            fits = host <= self.room[i + 1]
            hopeful = fits & (bound < self.best - self.slack)
            dropped = min(dropped, float(bound[fits & ~hopeful].min(initial=np.inf)))
            order = _front(kept, host, seconds, np.flatnonzero(hopeful))
            most = width if time.monotonic() < self.deadline else WIDTHS[0]
            if len(order) > most:
                self.truncated = True
                ranked = order[np.argsort(bound[order], kind="stable")]
                dropped = min(dropped, float(bound[ranked[most]]))
                order = ranked[:most]
            kept, host, seconds = kept[order], host[order], seconds[order]
            trail.append((parent[order], option[order]))
            if not len(order):
                break
        self._finish(seconds, trail)
        self.bound = max(self.bound, min(dropped, self.best))

    def _finish(self, seconds: np.ndarray, trail: list[tuple[np.ndarray, np.ndarray]]) -> None:
        if not len(seconds) or seconds.min() >= self.best:
            return
        label = int(np.argmin(seconds))
        self.best, places = float(seconds[label]), []
        for parent, option in reversed(trail):
            places.append(int(option[label]))
            label = int(parent[label])
        self.places = places[::-1]

    def _bound(self, i: int, kept: np.ndarray, host: np.ndarray) -> np.ndarray:
        """Least seconds that labels before unit ``i`` need besides their own."""
        room, least = self.rest[i]
        return np.interp(float(self.chain.reach[i]) - kept, room, least) + self.price * (host - self.chain.host)


def _extended(unit: ChainUnit, reach: int, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every label with every option that fits: the parent label and the option's place."""
    limit = np.minimum(unit.cap, reach - unit.kept)
    parents = [np.flatnonzero(kept <= most) for most in limit]
    option = np.repeat(np.arange(len(parents), dtype=np.int16), [len(p) for p in parents])
    return np.concatenate(parents).astype(np.int32), option


def _front(kept: np.ndarray, host: np.ndarray, seconds: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Indices (among ``alive``) of the undominated labels, by rising bytes.

    Where labels have more than ``HOST_LEVELS`` different numbers of bytes on the host, some dominated ones are left.
    """
    order = alive[np.lexsort((seconds[alive], host[alive], kept[alive]))]
    bytes_, hosted, taken = kept[order], host[order], seconds[order]
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (bytes_[1:] == bytes_[:-1]) & (hosted[1:] == hosted[:-1])
    levels = np.unique(hosted)
    levels = levels[:: max(1, -(-len(levels) // HOST_LEVELS))]
    level = np.searchsorted(levels, hosted, side="right") - 1
    for k in range(len(levels)):
        # what is no later in the order and no higher on the host needs no more of either
        fastest = np.minimum.accumulate(np.where(hosted <= levels[k], taken, np.inf))
        here = np.flatnonzero(level[1:] == k) + 1
        again[here] |= fastest[here - 1] <= taken[here]
    return order[~again]


def _relaxations(chain: Chain) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each place of the chain the least seconds that the rest can take, as a function of the room left.

    Room is ``reach[i]`` minus the bytes kept so far. The linear relaxation of the rest is convex and piecewise linear:
    prepending a unit merges the slopes of its options' lower hull into it (an infimal convolution), and a smaller reach
    cuts off its steepest part. Returned as breakpoints for ``np.interp``.
    """
    offset = 0.0
    lengths, slopes = np.zeros(0), np.zeros(0)  # steepest first
    out = [_breakpoints(offset, lengths, slopes)]
    for i in reversed(range(len(chain.units))):
        bytes_, seconds = _hull(chain.units[i])
        offset += seconds[0]
        lengths = np.concatenate([lengths, np.diff(bytes_)])
        slopes = np.concatenate([slopes, -np.diff(seconds) / np.diff(bytes_)])
        order = np.argsort(-slopes, kind="stable")
        lengths, slopes = lengths[order], slopes[order]
        cut = float(chain.reach[i + 1] - chain.reach[i]) - bytes_[0]
        if cut > 0:
            taken = np.clip(cut - np.concatenate([[0.0], np.cumsum(lengths)[:-1]]), 0.0, lengths)
            offset -= float(taken @ slopes)
            lengths, slopes = (lengths - taken)[taken < lengths], slopes[taken < lengths]
        out.append(_breakpoints(offset, lengths, slopes))
    return out[::-1]


def _breakpoints(offset: float, lengths: np.ndarray, slopes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    room = np.concatenate([[0.0], np.cumsum(lengths)])
    return room, offset - np.concatenate([[0.0], np.cumsum(lengths * slopes)])


def _hull(unit: ChainUnit) -> tuple[np.ndarray, np.ndarray]:
    """The lower convex hull of a unit's options over (kept bytes, seconds), falling part only."""
    hull: list[tuple[float, float]] = []
    for j in np.lexsort((unit.seconds, unit.kept)):
        x, y = float(unit.kept[j]), float(unit.seconds[j])
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    points = np.array(hull)
    return points[:, 0], points[:, 1]


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether ``b`` lies on or above the line from ``a`` to ``c``."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


# The structure that makes planning easy: units run in order, so only bytes kept and moved so far matter.


@dataclass(frozen=True)
class ChainUnit:
    """The undominated options of one unit, as arrays of equal length."""

    picks: np.ndarray  # index of each option in the problem's unit
    kept: np.ndarray  # bytes, int64
    seconds: np.ndarray
    host: np.ndarray  # bytes, int64; zeros where the problem has no host budget
    cap: np.ndarray  # most bytes that earlier units may have kept for this option to fit


@dataclass(frozen=True)
class Chain:
    """A problem as a walk along its units whose only state are the bytes kept and those on the host so far.

    ``reach[i]`` is the most bytes that units before ``i`` may have kept such that the rest can still be completed;
    a plan fits the budget exactly if ``reach[0] >= 0``. ``host``: most bytes on the host, never less than the least
    that any plan moves there.
    """

    units: tuple[ChainUnit, ...]
    reach: np.ndarray
    host: int

    def priced(self, price: float) -> Chain:
        """The chain in which a byte on the host costs ``price`` seconds and is not counted otherwise."""
        return self.with_seconds(lambda unit: unit.seconds + price * unit.host)

    def with_seconds(self, seconds: Callable[[ChainUnit], np.ndarray]) -> Chain:
        """The chain with other seconds of each option, in which bytes on the host do not count."""
        units = (replace(unit, seconds=seconds(unit), host=np.zeros_like(unit.host)) for unit in self.units)
        return replace(self, units=tuple(units), host=0)

    def sums(self, places: Sequence[int]) -> tuple[float, int]:
        """Seconds and bytes on the host of a plan, by the place of each unit's option."""
        picked = list(zip(self.units, places, strict=True))
        return sum(float(unit.seconds[k]) for unit, k in picked), sum(int(unit.host[k]) for unit, k in picked)


def needs(problem: Problem) -> tuple[list[np.ndarray], list[int]]:
    """Bytes that each option needs above what earlier units kept, and those of the points between units.

    Returns one int64 array per unit (by option), and one number for each of the ``units + 1`` places between them.
    """
    n = len(problem.units)
    between = [-INFINITE_BYTES] * (n + 1)
    own: list[np.ndarray] = [np.full(len(u.options), -INFINITE_BYTES, dtype=np.int64) for u in problem.units]
    for p in strongest(problem.points):
        if p.own is None:
            between[p.prefix] = max(between[p.prefix], p.base)
        else:
            options = problem.units[p.own].options
            need = [p.base + (o.forward if p.phase == "forward" else o.backward) for o in options]
            own[p.own] = np.maximum(own[p.own], need)
    return own, between


def strongest(points: tuple[Point, ...]) -> list[Point]:
    """Of points that differ in ``base`` only, the one with the most bytes (several micro-batches repeat a pattern)."""
    best: dict[tuple[int, int | None, str | None], Point] = {}
    for p in points:
        key = (p.prefix, p.own, p.phase)
        if key not in best or best[key].base < p.base:
            best[key] = p
    return list(best.values())


def as_chain(problem: Problem) -> Chain:
    """The chain of a problem. Raises ValueError where a point counts others than the units before the one that runs."""
    if any(p.own not in (None, p.prefix) for p in problem.points):
        raise ValueError("a point counts units out of order")
    own, between = needs(problem)
    units: list[ChainUnit] = []
    least = fewest = 0  # no assignment keeps less than this so far, or moves less to the host
    for i, unit in enumerate(problem.units):
        kept = np.array([o.kept for o in unit.options], dtype=np.int64)
        seconds = np.array([o.seconds for o in unit.options])
        host = np.array([0 if problem.host_budget is None else o.host for o in unit.options], dtype=np.int64)
        cap = problem.budget_bytes - np.maximum(own[i], between[i])
        alive = _undominated(kept, seconds, host, cap, least)
        units.append(ChainUnit(alive, kept[alive], seconds[alive], host[alive], cap[alive]))
        least, fewest = least + int(kept.min()), fewest + int(host.min())
    reach = np.empty(len(units) + 1, dtype=np.int64)
    reach[-1] = problem.budget_bytes - between[-1]
    for i in reversed(range(len(units))):
        fits = np.minimum(units[i].cap, reach[i + 1] - units[i].kept)
        reach[i] = fits.max() if len(fits) else -INFINITE_BYTES
    return Chain(tuple(units), reach, max(problem.host_budget or 0, fewest))


def _undominated(kept: np.ndarray, seconds: np.ndarray, host: np.ndarray, cap: np.ndarray, least: int) -> np.ndarray:
    """Indices of options that can fit and that no other option beats in all bytes, seconds and room alike."""
    alive: list[int] = []
    for j in np.lexsort((-cap, host, kept, seconds)):
        beaten = (kept[a] <= kept[j] and host[a] <= host[j] and cap[a] >= cap[j] for a in alive)
        if cap[j] >= least and not any(beaten):
            alive.append(int(j))
    return np.array(alive, dtype=np.int64)


def smallest_peak(problem: Problem) -> int:
    """The least peak that any assignment reaches, to the byte.

    From the last unit on: what the rest needs at least above what it finds kept is known when a unit is looked at.
    """
    own, between = needs(problem)
    peak = between.pop()
    for unit, need, gap in zip(reversed(problem.units), reversed(own), reversed(between), strict=True):
        kept = np.array([o.kept for o in unit.options], dtype=np.int64)
        peak = int(np.maximum(np.maximum(need, gap), kept + peak).min())
    return max(0, peak)
