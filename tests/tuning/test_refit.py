"""Refitting costs to measurements recovers what the device really does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.schema import OFFLOAD, RECOMPUTE, SAVE, Choice, Measurement, Prediction, Trial
from autockpt.schema.choices import CHUNKED_SOFTMAX
from autockpt.solvers.problem import Option, Problem, UnitOptions
from autockpt.tuning.refit import expected_seconds, fit, unseen_bytes
from tests import samples


def problem(units: int = 4) -> Problem:
    options = (
        Option(choice=SAVE, seconds=0.0, kept=100, forward=100, backward=100),
        Option(choice=RECOMPUTE, seconds=0.02, kept=10, forward=100, backward=100),
        Option(choice=OFFLOAD, seconds=0.03, kept=5, forward=100, backward=100),
    )
    return Problem(
        units=tuple(UnitOptions(name=f"layers.{i}", options=options) for i in range(units)),
        points=(),
        budget_bytes=1000,
        base_seconds=1.0,
    )


def trial(choices: dict[str, Choice], seconds: float, *, predicted: int = 500, measured: int = 500) -> Trial:
    reading = Measurement(peak_bytes=measured, step_seconds=seconds)
    return samples.trial(0, choices=choices, predicted=Prediction(peak_bytes=predicted), measured=reading)


def noisy(choices: dict[str, Choice], seconds: float, noise: float) -> Trial:
    measured = Measurement(peak_bytes=500, step_seconds=seconds, noise=noise)
    return trial(choices, seconds).model_copy(update={"measured": measured})


def plan(*choices: Choice) -> dict[str, Choice]:
    return {f"layers.{i}": choice for i, choice in enumerate(choices)}


@given(base=st.floats(0.1, 10), recompute=st.floats(0.4, 2.5), offload=st.floats(0.4, 2.5))
def test_recovers_costs_from_noise_free_trials(base: float, recompute: float, offload: float) -> None:
    plans = [
        plan(SAVE, SAVE, SAVE, SAVE),
        plan(RECOMPUTE, RECOMPUTE, RECOMPUTE, RECOMPUTE),
        plan(OFFLOAD, OFFLOAD, OFFLOAD, OFFLOAD),
        plan(SAVE, RECOMPUTE, SAVE, RECOMPUTE),
        plan(OFFLOAD, SAVE, OFFLOAD, SAVE),
    ]

    def truth(choices: dict[str, Choice]) -> float:
        kinds = [c.kind for c in choices.values()]
        return base + 0.02 * recompute * kinds.count("recompute") + 0.03 * offload * kinds.count("offload")

    fitted = fit(problem(), [trial(p, truth(p)) for p in plans])
    unseen = plan(RECOMPUTE, OFFLOAD, SAVE, RECOMPUTE)
    assert fitted.predict(problem(), unseen) == pytest.approx(truth(unseen), abs=0.02)
    assert fitted.error_seconds < 0.02


@pytest.mark.slow
@given(base=st.floats(0.1, 10), head=st.floats(-0.05, 0.1), recompute=st.floats(0.7, 1.4))
def test_what_the_head_adds_is_told_apart_from_what_layers_cost(base: float, head: float, recompute: float) -> None:
    options = tuple(
        Option(choice=choice, seconds=seconds, kept=10, forward=10, backward=10)
        for choice, seconds in ((SAVE, 0.0), (CHUNKED_SOFTMAX, -0.002))
    )
    whole = problem().model_copy(update={"units": (*problem().units, UnitOptions(name="lm_head", options=options))})

    def seconds(count: int, extra: float) -> float:
        return base + extra + 0.02 * recompute * count

    layers = {n: plan(*[RECOMPUTE] * n, *[SAVE] * (4 - n)) for n in (0, 1, 2, 4)}
    trials = [trial(layers[n], seconds(n, 0.0)) for n in (0, 2, 4)]
    trials += [trial({**layers[n], "lm_head": CHUNKED_SOFTMAX}, seconds(n, head)) for n in (1, 2)]
    fitted = fit(whole, trials)
    for found in trials:
        assert fitted.predict(whole, found.choices) == pytest.approx(found.score_seconds, abs=0.004)
    with_head, without = ({**layers[4], "lm_head": CHUNKED_SOFTMAX}, layers[4])
    difference = fitted.predict(whole, with_head) - fitted.predict(whole, without)
    assert difference == pytest.approx(head, abs=0.008)


def test_a_choice_that_adds_less_than_the_noise_keeps_its_cost() -> None:
    small = problem()
    options = tuple(o.model_copy(update={"seconds": o.seconds / 100}) for o in small.units[0].options)
    small = small.model_copy(update={"units": tuple(u.model_copy(update={"options": options}) for u in small.units)})

    def scale(noise: float) -> float:
        trials = [noisy(plan(*[SAVE] * 4), 0.99, noise), noisy(plan(*[RECOMPUTE] * 4), 1.01, noise)]
        return fit(small, trials).scale["recompute"]

    assert scale(0.02) == pytest.approx(1.0, abs=0.1)
    assert scale(0.0) > 3


def test_trials_of_a_single_step_leave_corrections_on() -> None:
    """Their noise is not known. Recomputing takes half as much again as the profile says."""
    counts = {4: 0.01, 0: 0.01, 1: 1.0, 2: 1.0, 3: 1.0}
    trials = [
        noisy(plan(*[RECOMPUTE] * count, *[SAVE] * (4 - count)), 1 + 0.03 * count, noise)
        for count, noise in counts.items()
    ]
    assert fit(problem(), trials).scale["recompute"] == pytest.approx(1.5, rel=0.05)


def test_bytes_that_ghost_runs_miss_are_kept_as_headroom() -> None:
    trials = [trial(plan(SAVE, SAVE, SAVE, SAVE), 1.0, predicted=500, measured=530)]
    assert unseen_bytes(trials) == 30
    assert unseen_bytes([trial(plan(SAVE, SAVE, SAVE, SAVE), 1.0, predicted=500, measured=480)]) == 0


def test_a_trial_is_expected_at_fitted_costs() -> None:
    """Recomputing takes twice as long as the profile says; where nothing was predicted nothing is expected."""
    plans = [plan(*[RECOMPUTE] * count, *[SAVE] * (4 - count)) for count in range(5)]
    measured = [trial(choices, 1.0 + 0.04 * count) for count, choices in enumerate(plans)]
    assert expected_seconds(problem(), measured) == {}
    trials = [
        t.model_copy(update={"number": n, "predicted": Prediction(peak_bytes=1, step_seconds=1.0 + 0.02 * n)})
        for n, t in enumerate(measured)
    ]
    expected = expected_seconds(problem(), trials)
    assert expected[0] == 1.0 and expected[4] == pytest.approx(1.16, rel=0.02)
