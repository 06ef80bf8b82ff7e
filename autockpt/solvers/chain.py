"""The structure that makes planning easy: units run in order, so only bytes kept and moved so far matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autockpt.schema.problem import Point, Problem

INFINITE_BYTES = 1 << 60


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
        return self._with_seconds(lambda unit: unit.seconds + price * unit.host)

    def by_host(self) -> Chain:
        """The chain in which bytes on the host are the seconds."""
        return self._with_seconds(lambda unit: unit.host.astype(float))

    def _with_seconds(self, seconds: Callable[[ChainUnit], np.ndarray]) -> Chain:
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
