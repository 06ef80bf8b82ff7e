"""A made-up device for searches: its true op times differ from what the profile believes, and it makes noise."""

import itertools
import random
from collections.abc import Mapping
from typing import Any

from autockpt.cost import CostModel, build_profile, uniform_graphs
from autockpt.errors import DeviceOutOfMemory
from autockpt.measuring.base import TIMED_CYCLE
from autockpt.schema import Choice, Graph, Measurement, OpTimes, parse_choice
from autockpt.workload.step import ignore
from tests.cost.made_up import simulated
from tests.cost.steps import SECONDS, step
from tests.samples import environment

CAPACITY = 1_000_000


class MadeUpDevice:
    """Measures made-up steps. ``f`` and the copies really take other times than the profile says."""

    def __init__(self, units: int = 6, *, noise: float = 0.0, capacity: int = CAPACITY, unseen: int = 0) -> None:
        self.names = [f"layers.{i}" for i in range(units)]
        self.noise, self.capacity, self.unseen = noise, capacity, unseen
        self.draw = random.Random(0)
        self.measured: list[dict[str, Choice]] = []
        self.interrupt_after: int | None = None
        self.beat = ignore
        self.environment = environment(capacity_bytes=CAPACITY)

    def ahead(self, plans: object) -> None:
        """One after the other, when asked for."""

    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph:
        return step(self.names, choices)

    def true_seconds(self, choices: Mapping[str, Choice]) -> float:
        times = SECONDS | {"f": 1.3}
        return simulated(self.trace(choices), times, bandwidth_out=25.0, bandwidth_in=25.0).step_seconds

    def true_peak(self, choices: Mapping[str, Choice]) -> int:
        return self.trace(choices).peak_bytes + self.unseen

    def profiled(
        self, kinds: tuple[str, ...] = ("save", "recompute", "offload"), host_budget: int | None = None
    ) -> CostModel:
        return build_profile(self, self.believed(), self.uniform(kinds), host_budget=host_budget)

    def believed(self, **more: Any) -> OpTimes:
        """What single ops are said to take."""
        rates = {"copy_out_bandwidth": 40.0, "copy_in_bandwidth": 40.0}
        return OpTimes(environment=self.environment, seconds=SECONDS, **(rates | more))

    def uniform(self, kinds: tuple[str, ...]) -> Any:
        """Every choice on all units, and its graph."""
        return uniform_graphs(self, self.trace().blocks(), kinds)

    def measure(self, choices: Mapping[str, Choice], *, steps: int = 5, budget_bytes: int | None = None) -> Measurement:
        if self.interrupt_after is not None and len(self.measured) >= self.interrupt_after:
            raise KeyboardInterrupt
        self.measured.append(dict(choices))
        peak = self.true_peak(choices)
        if peak > self.capacity:
            raise DeviceOutOfMemory("the made-up device is full")
        return Measurement(peak_bytes=peak, step_seconds=self._noisy(choices), noise=self.noise, steps=steps)

    def compare(self, plans: Mapping[str, Mapping[str, Choice]], *, rounds: int = 5) -> dict[str, list[float]]:
        times = {name: [self._noisy(choices) for _ in range(rounds)] for name, choices in plans.items()}
        for _ in range(rounds * len(plans)):
            self.beat(TIMED_CYCLE)
        return times

    def call(self, ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError(ref)

    def close(self) -> None: ...

    def _noisy(self, choices: Mapping[str, Choice]) -> float:
        return self.true_seconds(choices) * (1 + self.draw.gauss(0, self.noise))

    def optimum(self, budget: int) -> float:
        """Seconds of the fastest plan within the budget, by trying all."""
        kinds = [parse_choice(k) for k in ("save", "recompute", "offload")]
        plans = (
            dict(zip(self.names, picks, strict=True)) for picks in itertools.product(kinds, repeat=len(self.names))
        )
        return min(self.true_seconds(p) for p in plans if self.true_peak(p) <= budget)
