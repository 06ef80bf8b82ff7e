"""Measuring until a ratio of paired times is known well enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autockpt.measuring.statistics import Interval, ratio_interval


@dataclass(frozen=True)
class PairedTimes:
    """The outcome of measuring until sure. ``settled`` False: the rounds ran out before the interval was narrow."""

    ratio: Interval
    ours: tuple[float, ...]
    base: tuple[float, ...]
    settled: bool

    @property
    def rounds(self) -> int:
        """How many pairs were measured."""
        return len(self.ours)


def compare_until(
    draw: Callable[[int], tuple[Sequence[float], Sequence[float]]],
    *,
    within: float = 0.005,
    batch: int = 5,
    at_least: int = 10,
    at_most: int = 60,
) -> PairedTimes:
    """Measure pairs until the 95 % interval of their ratio is ± ``within`` of it, or ``at_most`` rounds are done.

    ``draw(n)`` measures n more interleaved rounds and returns (ours, base) in seconds. Looking again after each batch
    stops a little more readily on a lucky streak, so no look is taken before ``at_least`` rounds and only one a batch:
    the interval then still covers the truth in 92 to 95 of 100 cases.
    """
    ours: list[float] = []
    base: list[float] = []
    while True:
        todo = max(at_least, 1) if not ours else batch
        more_ours, more_base = draw(min(todo, at_most - len(ours)))
        ours.extend(more_ours)
        base.extend(more_base)
        ratio = ratio_interval(ours, base)
        settled = ratio.half_width <= within
        if settled or len(ours) >= at_most or not more_ours:
            return PairedTimes(ratio, tuple(ours), tuple(base), settled)
