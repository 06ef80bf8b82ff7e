"""A made-up device: what it "measures" is autockpt's step simulator with the true times, and noise. Nothing is run."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autockpt.cost import CostModel, build_profile, uniform_graphs
from autockpt.errors import DeviceOutOfMemory
from autockpt.measuring.statistics import noise as noise_of
from autockpt.schema import Choice, DeviceInfo, Environment, Graph, Measurement, OpTimes, plan_hash
from tests.cost.made_up import simulated
from tests.evidence.samplers.family import Instance
from tests.evidence.samplers.steps import HEAD, signatures, step

CAPACITY = 1 << 50
TABLE_ERROR = 0.1  # of every op time and bandwidth that the profile believes in, one standard deviation


@dataclass
class Truth:
    """What a plan really takes on the made-up device, remembered by plan: true seconds, exact bytes."""

    instance: Instance

    def __post_init__(self) -> None:
        self._seconds = signatures(self.instance)
        self._known: dict[str, tuple[float, int]] = {}

    def of(self, choices: Mapping[str, Choice]) -> tuple[float, int]:
        """Step seconds and peak bytes."""
        key = plan_hash(choices)
        if key not in self._known:
            inst = self.instance
            found = simulated(
                step(inst, choices),
                self._seconds,
                bandwidth_out=inst.bandwidth,
                bandwidth_in=inst.bandwidth,
                copy_queues=inst.queues,
            )
            self._known[key] = found.step_seconds, found.peak_bytes
        return self._known[key]


class MadeUpDevice:
    """A Measurer. Each measurement is off by ``noise`` (one standard deviation) as a whole, its cycles once more."""

    def __init__(self, truth: Truth, *, noise: float = 0.0, seed: int = 0) -> None:
        self.truth, self.noise = truth, noise
        self._draw = random.Random(seed)
        self.environment = environment(truth.instance)

    def measure(self, choices: Mapping[str, Choice], *, steps: int = 5, budget_bytes: int | None = None) -> Measurement:
        seconds, peak = self.truth.of(choices)
        if peak > CAPACITY:
            raise DeviceOutOfMemory("the made-up device is full")
        seconds *= self._off()
        times = tuple(seconds * self._off() for _ in range(steps))
        middle = statistics.median(times)
        return Measurement(peak_bytes=peak, step_seconds=middle, noise=noise_of(times), steps=steps, times=times)

    def compare(
        self, plans: Mapping[str, Mapping[str, Choice]], *, rounds: int = 5, budget_bytes: int | None = None
    ) -> dict[str, list[float]]:
        """Plans take turns; what slows a round slows all of them, and each cycle has its own noise."""
        found: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(rounds):
            off = self._off()
            for name, choices in plans.items():
                found[name].append(self.truth.of(choices)[0] * off * self._off())
        return found

    def call(self, ref: str, payload: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError(ref)

    def close(self) -> None: ...

    def _off(self) -> float:
        return max(0.5, 1 + self._draw.gauss(0, self.noise))


@dataclass(frozen=True)
class Traces:
    """Ghost-runs plans of an instance."""

    instance: Instance

    def ahead(self, plans: object) -> None:
        """One after the other, when asked for."""

    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph:
        return step(self.instance, choices)


def environment(instance: Instance) -> Environment:
    device = DeviceInfo(
        kind="cuda" if instance.queues else "cpu",
        name="made up, simulated",
        capacity_bytes=CAPACITY,
        copy_queues=instance.queues,
    )
    return Environment(device=device, versions={"autockpt": "0"})


def believed(instance: Instance, kinds: tuple[str, ...], *, seed: int, error: float = TABLE_ERROR) -> CostModel:
    """The profile that a search starts from: bytes exact, as those of ghost runs are; op times and bandwidths off."""
    rng = random.Random(seed)
    off = {text: rng.lognormvariate(0, error) for text in signatures(instance)}
    times = OpTimes(
        environment=environment(instance),
        seconds={text: seconds * off[text] for text, seconds in signatures(instance).items()},
        optimizer_seconds=instance.optimizer_seconds * off[HEAD[-1]],
        copy_out_bandwidth=instance.bandwidth * rng.lognormvariate(0, error),
        copy_in_bandwidth=instance.bandwidth * rng.lognormvariate(0, error),
    )
    traces = Traces(instance)
    blocks = [u for u in traces.trace().units if u.role == "block"]
    return build_profile(traces, times, uniform_graphs(traces, blocks, kinds))


def menu_of(profiled: CostModel) -> list[Choice]:
    """Every choice that a profile offers for any unit."""
    return list(dict.fromkeys(item.choice for menu in profiled.profile.menus for item in menu.items))
