"""The structure that makes planning easy: execution in order, so that only the bytes kept so far matter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autockpt.schema.problem import Option, Point, Problem

INFINITE_BYTES = 1 << 60


@dataclass(frozen=True)
class ChainUnit:
    """The undominated options of one unit, as arrays of equal length."""

    picks: np.ndarray  # index of each option in the problem's unit
    kept: np.ndarray  # bytes, int64
    seconds: np.ndarray
    cap: np.ndarray  # most bytes that earlier units may have kept for this option to fit


@dataclass(frozen=True)
class Chain:
    """A problem as a walk along its units whose only state is the bytes kept so far.

    ``reach[i]`` is the most bytes that units before ``i`` may have kept such that the rest can still be completed;
    the problem is feasible exactly if ``reach[0] >= 0``.
    """

    units: tuple[ChainUnit, ...]
    reach: np.ndarray


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
            need = [p.base + own_bytes(o, p) for o in problem.units[p.own].options]
            own[p.own] = np.maximum(own[p.own], need)
    return own, between


def own_bytes(option: Option, point: Point) -> int:
    """What the running unit needs at a point under an option."""
    return option.forward if point.phase == "forward" else option.backward


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
    least = 0  # no assignment keeps less than this so far
    for i, unit in enumerate(problem.units):
        kept = np.array([o.kept for o in unit.options], dtype=np.int64)
        seconds = np.array([o.seconds for o in unit.options])
        cap = problem.budget_bytes - np.maximum(own[i], between[i])
        alive = _undominated(kept, seconds, cap, least)
        units.append(ChainUnit(alive, kept[alive], seconds[alive], cap[alive]))
        least += int(kept.min())
    reach = np.empty(len(units) + 1, dtype=np.int64)
    reach[-1] = problem.budget_bytes - between[-1]
    for i in reversed(range(len(units))):
        fits = np.minimum(units[i].cap, reach[i + 1] - units[i].kept)
        reach[i] = fits.max() if len(fits) else -INFINITE_BYTES
    return Chain(tuple(units), reach)


def _undominated(kept: np.ndarray, seconds: np.ndarray, cap: np.ndarray, least: int) -> np.ndarray:
    """Indices of options that can fit and that no other option beats in bytes, seconds and room alike."""
    alive: list[int] = []
    order = np.lexsort((-cap, kept, seconds))
    for j in order:
        if cap[j] >= least and not any(kept[a] <= kept[j] and cap[a] >= cap[j] for a in alive):
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
