"""Exact planning of a chain by label setting: far cheaper than branching, and blind to symmetry.

Walking along the units, a partial plan is a *label* (bytes kept so far, extra seconds so far). Of two labels the one
with no more bytes and no more seconds can be completed at least as well, so the other is dropped: identical units,
whose plans a branching solver tells apart, collapse into the same labels. A linear relaxation of the remaining units
bounds what a label can still become and drops those that cannot beat the best plan known. (Dynamic programming with
dominance and bounds for the multiple-choice knapsack problem: Kellerer, Pferschy, Pisinger, "Knapsack Problems",
2004, ch. 11; here with a capacity at every place of the chain instead of one at its end.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from autockpt.schema.problem import Assignment, Problem
from autockpt.solvers.answer import judge, relative_gap
from autockpt.solvers.chain import Chain, ChainUnit, as_chain, smallest_peak

WIDTHS = (64, 4096, 65536)  # labels kept per unit in successive passes; the first pass finds a good plan to bound by


def labels(problem: Problem, *, time_limit: float = 10.0, gap: float = 1e-6) -> Assignment:
    """The fastest assignment within the budget, proven optimal unless ``gap`` of the result says otherwise.

    ``time_limit`` in seconds and ``gap`` (accepted distance from the optimum as a share of the step time) end the proof
    early; the result's own ``gap`` is what was proven. Where nothing fits, the result is infeasible and holds the
    fastest assignment of smallest peak. Raises ValueError where the problem is not a chain.
    """
    chain = as_chain(problem)
    if chain.reach[0] < 0:
        leanest = labels(problem.model_copy(update={"budget_bytes": smallest_peak(problem)}), time_limit=time_limit)
        return leanest.model_copy(update={"feasible": False, "gap": 0.0})
    search = _Search(chain, time.monotonic() + time_limit, slack=gap * abs(problem.base_seconds))
    for width in WIDTHS:
        search.walk(width)
        if not search.truncated or search.best - search.bound <= search.slack or time.monotonic() > search.deadline:
            break
    proven = relative_gap(problem, search.best, min(search.best, search.bound))
    return judge(problem, search.picks, gap=proven)


@dataclass
class _Search:
    chain: Chain
    deadline: float
    slack: float  # seconds that the result may be from the optimum
    best: float = np.inf
    bound: float = -np.inf  # no plan is faster than this or ``best``
    picks: list[int] = field(default_factory=list)
    truncated: bool = False

    def __post_init__(self) -> None:
        self.rest = _relaxations(self.chain)
        self.bound = float(self._bound(0, np.zeros(1))[0])

    def walk(self, width: int) -> None:
        """One pass along the chain with at most ``width`` labels per unit; updates ``best`` and ``bound``."""
        kept, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
        trail: list[tuple[np.ndarray, np.ndarray]] = []
        dropped = np.inf  # least bound of all labels given up although they might have won
        self.truncated = False
        for i, unit in enumerate(self.chain.units):
            kept, seconds, parent, option = _extend(unit, int(self.chain.reach[i + 1]), kept, seconds)
            bound = seconds + self._bound(i + 1, kept)
            hopeful = bound < self.best - self.slack
            dropped = min(dropped, float(bound[~hopeful].min(initial=np.inf)))
            order = _front(kept, seconds, np.flatnonzero(hopeful))
            most = width if time.monotonic() < self.deadline else WIDTHS[0]
            if len(order) > most:
                self.truncated = True
                ranked = order[np.argsort(bound[order], kind="stable")]
                dropped = min(dropped, float(bound[ranked[most]]))
                order = ranked[:most]
            kept, seconds = kept[order], seconds[order]
            trail.append((parent[order], option[order]))
            if not len(order):
                break
        self._finish(seconds, trail)
        self.bound = max(self.bound, min(dropped, self.best))

    def _finish(self, seconds: np.ndarray, trail: list[tuple[np.ndarray, np.ndarray]]) -> None:
        if not len(seconds) or seconds.min() >= self.best:
            return
        label = int(np.argmin(seconds))
        self.best, picks = float(seconds[label]), []
        for unit, (parent, option) in zip(reversed(self.chain.units), reversed(trail), strict=True):
            picks.append(int(unit.picks[option[label]]))
            label = int(parent[label])
        self.picks = picks[::-1]

    def _bound(self, i: int, kept: np.ndarray) -> np.ndarray:
        room, least = self.rest[i]
        return np.interp(float(self.chain.reach[i]) - kept, room, least)


def _extend(
    unit: ChainUnit, reach: int, kept: np.ndarray, seconds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every label with every option that fits: kept bytes, seconds, parent label, option index."""
    limit = np.minimum(unit.cap, reach - unit.kept)
    parents = [np.flatnonzero(kept <= most) for most in limit]
    option = np.repeat(np.arange(len(parents), dtype=np.int16), [len(p) for p in parents])
    parent = np.concatenate(parents).astype(np.int32)
    return kept[parent] + unit.kept[option], seconds[parent] + unit.seconds[option], parent, option


def _front(kept: np.ndarray, seconds: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Indices (among ``alive``) of the undominated labels, by rising bytes and falling seconds."""
    if not len(alive):
        return alive
    order = alive[np.lexsort((seconds[alive], kept[alive]))]
    fastest = np.minimum.accumulate(seconds[order])
    first = np.ones(len(order), dtype=bool)
    first[1:] = seconds[order][1:] < fastest[:-1]
    return order[first]


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
