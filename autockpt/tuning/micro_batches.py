"""Which micro-batches fit with one choice on every layer, by ghost runs of a few of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autockpt.profiling import uniform_graphs
from autockpt.schema import Listener
from autockpt.tuning.alternatives import WhatIf, predictions
from autockpt.tuning.jobs import Job
from autockpt.tuning.opening import blocks_of


@dataclass
class Sizes:
    """What ghost runs of the two smallest micro-batches say of all: peaks of uniform plans grow by a straight line.

    Where they bend (no padding in a single row, other kernels, a peak at another moment) ``look`` ghost-runs the first
    size that seems too large, and a search of that very size decides about the one below.
    """

    sizes: list[int]
    budget_bytes: int
    peaks: dict[int, dict[str, int]]
    look: Callable[[int], dict[str, int]]

    def predicted(self, size: int, kind: str) -> int | None:
        """Peak bytes of a micro-batch with one choice on every layer; None where the model refuses it."""
        if size in self.peaks:
            return self.peaks[size].get(kind)
        known = sorted((size, peaks[kind]) for size, peaks in self.peaks.items() if kind in peaks)
        if len(known) < 2:
            return known[0][1] if known else None
        (one, first), (two, second) = known[0], known[-1]
        return round(first + (second - first) * (size - one) / (two - one))

    def largest(self, *kinds: str) -> int | None:
        """The largest micro-batch that fits with one of these choices on every layer; None where none does."""

        def fits(size: int) -> bool:
            return any((p := self.predicted(size, kind)) is not None and p <= self.budget_bytes for kind in kinds)

        while True:
            largest = max(filter(fits, self.sizes), default=None)
            above = next((size for size in self.sizes if size > (largest or 0)), None)
            if above is None or above in self.peaks:
                return largest
            self.peaks[above] = self.look(above)


def foreseen_sizes(job: Callable[[int], Job], judge: WhatIf, sizes: list[int], listener: Listener) -> Sizes:
    """Ghost-run the two smallest sizes with one choice on every layer, and others when they are asked about."""

    def look(size: int) -> dict[str, int]:
        with job(size).tracer(judge.device) as tracer:
            uniform = uniform_graphs(tracer, blocks_of(tracer), judge.kinds)
            return {kind: said.peak_bytes for kind, said in predictions(judge, uniform).items()}

    peaks = {}
    for size in sizes[1::-1]:
        peaks[size] = look(size)
        listener.advance()
    return Sizes(sizes, judge.budget_bytes, peaks, look)
