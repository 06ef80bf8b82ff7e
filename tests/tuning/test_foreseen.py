"""What steps cannot tell apart, prices may; what steps show, prices do not talk away."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema import RECOMPUTE, SAVE, Choice, Measurement, Prediction, Trial
from autockpt.tuning.refit import FORESIGHT, ForeseenTimes, foreseen
from tests.tuning.test_refit import plan, problem
from tests.tuning.test_refit import trial as measured_trial

TRULY = {0: 1.0, 1: 1.02, 2: 1.04, 3: 1.06, 4: 1.08}  # step seconds by the number of recomputed layers, as priced


def trial(number: int, seconds: float, noise: float, simulated: float | None = None) -> Trial:
    """A plan that recomputes ``number`` of four layers."""
    choices: dict[str, Choice] = plan(*([RECOMPUTE] * number + [SAVE] * (4 - number)))
    numbers = {
        "number": number,
        "predicted": Prediction(peak_bytes=1, step_seconds=simulated),
        "measured": Measurement(peak_bytes=1, step_seconds=seconds, noise=noise),
    }
    return measured_trial(choices, seconds).model_copy(update=numbers)


def fastest(noise: float, seed: int) -> tuple[int, int]:
    """By steps alone and by both, of plans with one to four recomputed layers measured with this noise."""
    draw = random.Random(seed)
    trials = [trial(n, TRULY[n] * (1 + draw.gauss(0, noise)), 2 * noise) for n in TRULY]
    measured = {t.number: t.score_seconds for t in trials[1:]}
    weighed = foreseen(problem(), trials).weigh(measured, dict.fromkeys(measured, noise))
    return min(measured, key=lambda n: measured[n]), min(weighed, key=lambda n: weighed[n])


def test_the_lucky_one_of_a_noisy_device_is_seldom_named() -> None:
    found = [fastest(0.03, seed) for seed in range(200)]
    alone, both = (statistics.fmean(TRULY[n] for n in column) for column in zip(*found, strict=True))
    assert both - 1.02 < (alone - 1.02) / 2


def test_exact_steps_stand_against_any_expectation() -> None:
    lies = ForeseenTimes({1: 1.0, 2: 2.0}, FORESIGHT)
    assert lies.weigh({1: 1.5, 2: 1.4}, {1: 0.0, 2: 0.0}) == pytest.approx({1: 1.5, 2: 1.4})


def test_a_plan_of_which_nothing_is_expected_keeps_what_was_measured() -> None:
    expected = ForeseenTimes({1: 1.0, 2: 1.1}, 0.01)
    assert expected.weigh({7: 0.9}, {7: 0.1}) == {7: 0.9}
    weighed = expected.weigh({1: 1.0, 2: 1.0, 7: 0.9}, dict.fromkeys((1, 2, 7), 0.02))
    assert weighed[7] == 0.9 and weighed[1] < weighed[2]
    stranger = trial(1, 1.0, 0.01).model_copy(update={"choices": {"elsewhere": RECOMPUTE}})
    assert foreseen(problem(), [stranger]).seconds == {}


def test_the_simulated_step_counts_where_prices_cannot_tell() -> None:
    """Copies that hide behind a neighbour's compute are seen by the schedule alone."""
    trials = [trial(0, 1.0, 0.02, 1.0), trial(2, 1.04, 0.02, 1.01), trial(3, 1.06, 0.02, 1.06)]
    expected = foreseen(problem(), trials)
    assert expected.seconds[2] / expected.seconds[3] < TRULY[2] / TRULY[3] - 0.01


def test_predictions_that_miss_by_more_than_noise_count_for_less() -> None:
    good = foreseen(problem(), [trial(n, TRULY[n], 0.001) for n in TRULY])
    wild = {0: 1.0, 1: 1.2, 2: 1.02, 3: 1.3, 4: 1.1}
    bad = foreseen(problem(), [trial(n, wild[n], 0.001) for n in wild])
    assert good.error <= FORESIGHT < bad.error
    noisy = foreseen(problem(), [trial(n, wild[n], 0.5) for n in wild])
    assert noisy.error <= FORESIGHT


@given(
    st.dictionaries(st.integers(0, 9), st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1),
    st.floats(1e-4, 0.1),
    st.floats(0, 0.2),
)
def test_weighed_seconds_lie_between_both(times: dict[int, tuple[float, float]], error: float, noise: float) -> None:
    measured = {n: m for n, (m, _) in times.items()}
    expected = ForeseenTimes({n: e for n, (_, e) in times.items()}, error)
    weighed = expected.weigh(measured, dict.fromkeys(measured, noise))
    level = statistics.median([m / e for m, e in times.values()])
    if len(times) % 2:
        for n, (m, e) in times.items():
            ends = sorted((m, e * level))
            assert ends[0] * (1 - 1e-9) <= weighed[n] <= ends[1] * (1 + 1e-9)
