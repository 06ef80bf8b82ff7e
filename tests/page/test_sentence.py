"""The sentences of a page agree with one another and with its tables."""

from __future__ import annotations

from pathlib import Path

from autockpt.page.plans import GHOST, MEASURED, SIMULATED, PlanPoint, Plans, Threshold
from autockpt.page.render import _spread, run_page
from autockpt.page.sentence import more_budget, next_steps, why
from autockpt.schema import OFFLOAD, RECOMPUTE, SAVE, Measurement, Prediction, ResolvedBudget, words
from autockpt.schema.outlook import GhostAnswer, Outlook
from tests.page.samples import make_run

BUDGET = ResolvedBudget(asked="1KB", bytes=1000)


def point(key: str, peak: int, seconds: float, basis: str = SIMULATED, interval: float | None = 0.01) -> PlanPoint:
    low, high = (seconds * (1 - interval), seconds * (1 + interval)) if interval else (None, None)
    phase = "" if basis == GHOST else "solver"
    choices = {"h.0": RECOMPUTE, "h.1": SAVE}
    return PlanPoint(key, key, phase, basis, basis, peak <= 1000, peak, seconds, peak, seconds, choices, low, high)


def plans(*points: PlanPoint) -> Plans:
    """With ``best`` as the answer, and a threshold at every plan."""
    at = [Threshold(p.peak or 0, p.key if p.sure else "best", None if p.sure else p.key) for p in points]
    return Plans({p.key: p for p in points}, (), tuple(sorted(at, key=lambda t: t.bytes)), "best")


def test_plans_within_the_noise_are_about_as_fast() -> None:
    ours, other = (Measurement(peak_bytes=1, step_seconds=s, noise=0.1, steps=3) for s in (1.0, 1.1))
    assert words.compared(ours, other, "saving everything").startswith("about as fast as saving everything")
    exact = ours.model_copy(update={"noise": 0.01}), other.model_copy(update={"noise": 0.01})
    assert words.compared(*exact, "saving everything") == "9.1 % faster than saving everything (±1.4 %)"


def test_times_without_an_interval_ask_for_another_measurement() -> None:
    sure, unsure = (point("best", 900, 1.0, MEASURED, noise) for noise in (0.01, None))
    assert not any("--again" in step for step in next_steps(plans(sure), BUDGET, "measured", "finished", "plan.yaml"))
    assert any("--again" in step for step in next_steps(plans(unsure), BUDGET, "measured", "finished", "plan.yaml"))


def test_a_leaner_plan_that_is_as_fast_is_the_next_leaner_one() -> None:
    said = why(plans(point("best", 900, 1.0), point("alike", 800, 1.0), point("slow", 700, 2.0)), [])
    assert "The next leaner one, 100 B less, would cost no more time" in said


def test_what_fits_the_budget_already_needs_no_more_memory() -> None:
    found = more_budget(plans(point("best", 900, 1.0), point("untried", 950, 0.5, GHOST)), BUDGET)
    assert found[0].startswith("Another plan that fits this budget would be 50.0 % faster")
    assert more_budget(plans(point("best", 900, 1.0), point("larger", 1050, 0.5)), BUDGET)[0].startswith(
        "Another 100 B"
    )


def test_the_nearest_larger_budget_stays_in_the_table() -> None:
    rows = [{"bytes": n, "point": point(str(n), n, 100.0 - n, GHOST)} for n in range(20)]
    for nearest in rows:
        assert nearest in _spread(list(rows), 14, nearest)


def test_marks_are_explained_only_where_there_are_such(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert "rings" not in run_page(run)
    ghost = GhostAnswer(choices={"h.1": OFFLOAD}, predicted=Prediction(peak_bytes=1950, step_seconds=0.13))
    run.write_outlook(Outlook(plans=(ghost,)))
    page = run_page(run)
    assert "full rings were ghost-run" in page and "dotted rings" not in page and "filled ones" not in page
