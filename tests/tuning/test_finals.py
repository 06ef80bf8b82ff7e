"""The best few interleaved, on times that are made up."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.schema import Measurement, Prediction, Silence
from autockpt.tuning.clock import Clock
from autockpt.tuning.finals import (
    BATCH,
    EXPECTED_WITHIN,
    FINALISTS,
    MOST_ROUNDS,
    Final,
    contenders,
    race,
    weighed,
)
from autockpt.tuning.targets.measured import Measured
from autockpt.tuning.trials import Trials
from tests.samples import environment, trial


def finals(noise: Any, seconds_left: float = 60.0) -> tuple[Final, list[tuple[int, ...]]]:
    """Of three candidates, the last of them slow, and a baseline; ``noise(plan, round)`` is a factor."""
    trials = [trial(number, measured=Measurement(peak_bytes=1, step_seconds=1.0)) for number in range(4)]
    seconds, batches = {0: 1.01, 1: 1.0, 2: 1.4, 3: 1.2}, []

    def compare(plans: Any, rounds: int) -> dict[str, list[float]]:
        batches.append(tuple(sorted(map(int, plans))))
        start = BATCH * (len(batches) - 1)
        return {n: [seconds[int(n)] * noise(int(n), start + r) for r in range(rounds)] for n in plans}

    return race(trials[:3], trials[3:], compare, {}, seconds=seconds_left), batches


def test_finals_go_on_between_those_who_may_win() -> None:
    final, batches = finals(lambda plan, number: 1 + 0.05 * math.sin(7 * plan + 3 * number))
    assert min(final.last, key=final.ratio) == 1
    assert batches[0] == (0, 1, 2, 3)
    assert len(batches) > 1 and all(set(batch) == {0, 1} for batch in batches[1:])


def test_a_disturbed_step_moves_no_other_plan() -> None:
    """Neither of the plan by whose rounds the others' seconds are known."""
    final = Final({0: [1.0, 2.0, 1.0], 1: [1.0] * 3, 3: [1.2] * 3}, (0, 1))
    assert [final.seconds(n) for n in (0, 1, 3)] == [1.0, 1.0, 1.2]


def test_finals_compare_what_ran_side_by_side() -> None:
    """The machine takes twice as long after the first rounds: the plan that left by then is not said to be fast."""
    final, _ = finals(lambda plan, number: (1 + 0.02 * math.sin(7 * plan + 3 * number)) * (1 if number < BATCH else 2))
    assert final.seconds(3) / final.seconds(1) == pytest.approx(1.2, rel=0.05)


def test_finals_end_once_no_rival_may_be_much_faster() -> None:
    """A leader by luck is not named after few rounds; one that may be slower, but by next to nothing, is."""
    unlucky = {0: 1.0, 1: 1.02, 2: 1.012}
    final, batches = finals(lambda plan, number: unlucky.get(number, 1.0) if plan == 1 else 1.0)
    assert min(final.last, key=final.ratio) == 1 and len(batches) > 1
    final, batches = finals(lambda plan, number: (0.99 if plan == 0 else 1.0) * (1 + 0.001 * ((plan + number) % 2)))
    assert len(batches) == 1


def test_only_what_may_be_the_fastest_takes_part() -> None:
    """By measurements where these are exact; else what is predicted to be fast as well, and no more than a few."""
    times, expected = {0: 1.0, 1: 1.05, 2: 1.1, 3: 1.5}, {0: 1.01, 1: 1.0, 2: 1.0, 3: 1.5}
    assert contenders(times, 0.0, expected) == [0]
    assert contenders(times, 0.05, expected)[:3] == [1, 2, 0]
    assert contenders(times, 0.05, {0: 1.0, 1: 1.1, 2: 1.1, 3: 1.5}, {0: 1.1, 1: 1.1, 2: 1.0, 3: 1.5}) == [0, 2]
    assert contenders(times, 0.03, {}) == [0, 1]
    assert len(contenders({n: 1 + n / 1000 for n in range(20)}, 0.01, {})) == FINALISTS


def test_the_fastest_as_tried_takes_part_whatever_was_predicted() -> None:
    seconds = {0: 1.2, 1: 1.05, 2: 1.0, 3: 1.06, 4: 1.07}
    predicted = seconds | {2: 1.03, 3: 0.98, 4: 0.985}
    trials = Trials(None, Clock(Silence()))
    trials.budget_bytes, trials.expected = 1, lambda: predicted
    for number, each in seconds.items():
        expected = Prediction(peak_bytes=1, step_seconds=predicted[number])
        trials.put(trial(number, predicted=expected, measured=Measurement(peak_bytes=1, step_seconds=each)))
    measurer = SimpleNamespace(
        environment=environment(),
        compare=lambda plans, rounds: {name: [seconds[int(name)]] * rounds for name in plans},
        beat=None,
    )
    target = Measured(None, Clock(Silence()), measurer)  # type: ignore[arg-type]
    named = target.winner(trials, [], math.inf)
    assert named is not None and named.number == 2


def swinging(plan: int, number: int) -> float:
    """Neither of the first two plans is ever known to be faster."""
    return 1 + (0.2 if plan < 2 else 0.02) * math.sin(7 * plan + 3 * number)


def test_finals_that_nobody_wins_end() -> None:
    final, batches = finals(swinging)
    assert len(batches) * BATCH == MOST_ROUNDS == len(final.times[0]) == len(final.times[1])
    assert sorted(final.last) == [0, 1]


def test_no_rounds_are_begun_that_would_exceed_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan's round takes a second: twelve for the first batch, then six each."""
    now = 0

    def noise(plan: int, number: int) -> float:
        nonlocal now
        now += 1
        return swinging(plan, number)

    monkeypatch.setattr("autockpt.tuning.finals.time", SimpleNamespace(monotonic=lambda: now))
    assert [len(finals(noise, seconds)[1]) for seconds in (5, 6, 15, 18)] == [1, 2, 3, 4]


def test_the_error_is_of_what_the_rounds_do_not_share() -> None:
    in_step = {0: [1.0, 1.5, 1.2], 1: [2.0, 3.0, 2.4]}
    assert Final(in_step, (0, 1)).error == pytest.approx(0.0)
    assert Final(in_step, (0,)).error == 0.0
    assert Final({0: [1.0, 1.02, 1.0, 1.02], 1: [1.01] * 4}, (0, 1)).error == pytest.approx(0.004, rel=0.1)


def test_predictions_decide_where_steps_swing() -> None:
    """Steps that swing by a fifth say little of a plan that is predicted to be slower by a twentieth."""
    trials = [trial(number, measured=Measurement(peak_bytes=1, step_seconds=1.0)) for number in range(2)]
    rounds_of = Counter[str]()

    def compare(plans: Any, rounds: int) -> dict[str, list[float]]:
        rounds_of.update(dict.fromkeys(plans, rounds))
        return {n: [1 + 0.2 * math.sin(7 * int(n) + 3 * r) for r in range(rounds)] for n in plans}

    race(trials, [], compare, {0: 1.0, 1: 1.05}, seconds=math.inf)
    assert rounds_of["0"] == BATCH


def test_what_is_expected_counts_as_much_as_measurements_are_off() -> None:
    measured, expected = {0: 1.0, 1: 1.02, 2: 1.5}, {0: 2.04, 1: 2.0}
    assert weighed(measured, expected, 0.0) == pytest.approx(measured)
    noisy = weighed(measured, expected, 1.0)
    assert noisy[0] / noisy[1] == pytest.approx(1.02, rel=1e-3) and noisy[2] == 1.5
    alike = weighed(measured, expected, EXPECTED_WITHIN)
    assert alike[0] == pytest.approx(alike[1], rel=1e-3)
    assert weighed(measured, {}, 1.0) == measured
