"""Candidates beside a plan that stays the same: load misleads nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autockpt.schema import RECOMPUTE, SAVE, Choice, Measurement, parse_choice
from autockpt.tuning.timing import Pairing
from autockpt.tuning.trials import Candidate, Score, Trials

PLAIN, SLOW, GOOD = ({"layer": c} for c in (SAVE, RECOMPUTE, parse_choice("offload")))
SECONDS = {"save": 1.0, "recompute": 1.5, "offload": 1.1}


class Machine:
    """Cycles take their time by ``load``, which the test sets."""

    def __init__(self) -> None:
        self.load, self.cycles = 1.0, 0

    def cycle(self, choices: Mapping[str, Choice]) -> float:
        self.cycles += 1
        return SECONDS[choices["layer"].kind] * self.load

    def measure(self, choices: Mapping[str, Choice], *, steps: int, **how: Any) -> Measurement:
        times = tuple(self.cycle(choices) for _ in range(steps))
        return Measurement(peak_bytes=10, step_seconds=times[0], times=times)

    def compare(self, plans: Mapping[str, Any], *, rounds: int, **how: Any) -> dict[str, list[float]]:
        assert how["warmup"] == 0
        return {name: [self.cycle(choices) for _ in range(rounds)] for name, choices in plans.items()}


@pytest.fixture
def machine() -> Machine:
    return Machine()


def pairing_on(machine: Machine, trials: Trials | None = None) -> Pairing:
    measurer: Any = machine
    pairing = Pairing(measurer)
    pairing.begin(trials or Trials(None))
    return pairing


def test_a_machine_that_others_use_more_and_more_changes_no_ranking(machine: Machine) -> None:
    pairing = pairing_on(machine)
    pairing.measure(PLAIN, steps=2, budget_bytes=None)
    slow = pairing.measure(SLOW, steps=2, budget_bytes=None)
    machine.load = 2.3
    pairing.measure(SLOW, steps=2, budget_bytes=None)  # the load came between two trials: half of its readings know
    good = pairing.measure(GOOD, steps=2, budget_bytes=None)
    assert slow.step_seconds == pytest.approx(1.5)
    assert good.step_seconds == pytest.approx(1.1)
    assert good.times == pytest.approx((2.53, 2.53)) and good.beside == pytest.approx((2.3, 2.3))


def test_an_old_reading_of_the_standard_is_not_relied_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("autockpt.tuning.timing.time.monotonic", lambda: now[0])
    pairing = pairing_on(machine)
    pairing.measure(PLAIN, steps=2, budget_bytes=None)
    pairing.measure(SLOW, steps=2, budget_bytes=None)
    machine.load, now[0] = 2.0, 60.0
    assert pairing.measure(GOOD, steps=2, budget_bytes=None).step_seconds == pytest.approx(1.1)


def test_a_search_that_goes_on_keeps_to_the_plan_of_before(machine: Machine) -> None:
    trials = Trials(None)
    first = pairing_on(machine, trials)
    score = Score("measured", first.measure(PLAIN, steps=2, budget_bytes=None))
    trials.write(Candidate(dict(PLAIN), "none"), score, elapsed=0)
    machine.load = 3.0
    again = pairing_on(machine, trials)
    assert again.measure(GOOD, steps=2, budget_bytes=None).step_seconds == pytest.approx(1.1)


def test_the_noise_is_learned_from_all_pairs(machine: Machine) -> None:
    pairing = pairing_on(machine)
    pairing.measure(PLAIN, steps=2, budget_bytes=None)
    before = pairing.measure(GOOD, steps=4, budget_bytes=None).noise
    for _ in range(8):
        pairing.measure(GOOD, steps=4, budget_bytes=None)
    assert pairing.measure(GOOD, steps=4, budget_bytes=None).noise < before / 2
