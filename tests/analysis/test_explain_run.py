"""The plan of a run, explained from the run's files."""

from pathlib import Path

import pytest

from autockpt.analysis.explain import explain_run, fronts
from autockpt.analysis.explanation import Explanation
from autockpt.schema import OFFLOAD, RECOMPUTE, SAVE, Choice, Menu, Prediction, Unit
from autockpt.schema.choices import KeepAttention
from autockpt.schema.run_directory import RunDirectory, plan_at
from autockpt.schema.trial import GhostAnswer, Outlook
from tests.analysis.samples import BUDGET, item, make_run, plan_of
from tests.samples import small_graph


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = make_run(tmp_path)
    graph = small_graph()
    made.write_graph(graph.model_copy(update={"resident_bytes": graph.resident_bytes - 400}), "plan")
    return made


def explained(run: RunDirectory, *budget: str) -> Explanation:
    said = explain_run(run.path, plan_at(run.path), *budget)
    assert said is not None
    return said


def test_a_run_is_explained_without_its_model(run: RunDirectory) -> None:
    """The model is called ``small``: no such model could be built."""
    said = explained(run)
    assert said.model == "small" and said.status == "measured" and said.basis == "measured"
    assert said.peak_bytes == 1847 == sum(h.peak_bytes for h in said.holdings) and said.measured_peak == 1850
    assert said.choices == plan_of(RECOMPUTE, SAVE) and said.budget == BUDGET and said.fits
    assert (said.save_all_peak, said.smallest_peak) == (2197, 1697), "a trial that failed is no plan to compare with"
    assert said.fronts[0].count == 2 and said.speed is not None and said.speed.seconds == 0.16


def test_neighbours_are_the_plans_that_the_search_tried(run: RunDirectory) -> None:
    why = explained(run).why
    assert why is not None and why.leaner is not None and why.faster is not None and why.best is None
    assert why.leaner.choices == plan_of(RECOMPUTE, RECOMPUTE) and why.faster.choices == plan_of(SAVE, SAVE)
    assert why.chosen.step_seconds == pytest.approx(0.176)


def test_neighbours_are_ghost_runs_of_other_budgets_too(run: RunDirectory) -> None:
    ghost = Prediction(peak_bytes=2000, step_seconds=0.15)
    run.write_outlook(Outlook(plans=(GhostAnswer(choices={"h.1": OFFLOAD}, predicted=ghost),)))
    said = explained(run, "2.1KB")
    assert said.why is not None and said.why.best is not None and said.why.best.peak_bytes == 2000
    assert [step.reach for step in said.budgets if step.ours] == [said.why.best]


def test_only_a_plan_of_the_runs_graphs_is_explained_from_them(run: RunDirectory) -> None:
    plan = plan_at(run.path)
    assert explain_run(run.plan_path, plan) is not None
    text = run.plan_path.read_text()
    run.plan_path.write_text(text.replace("h.0: recompute", "h.0: save"))
    assert explain_run(run.path, plan_at(run.path)) is None, "an edited plan"
    run.plan_path.write_text(text)
    timeless = plan.model_copy(update={"predicted": Prediction(peak_bytes=1800)})
    assert explain_run(run.path, timeless) is None, "a plan without predicted seconds"
    (run.path / "graph-plan.json.gz").unlink()
    assert explain_run(run.path, plan) is None, "a run without the plan's graph"
    assert explain_run(run.path.parent, plan) is None, "no run"


UNITS = tuple(Unit(name=f"h.{i}", cls="Block", kind=0) for i in range(4))


MENU = Menu(
    kind=0,
    representative="h.2",
    items=(item(SAVE, 100, 0), item(RECOMPUTE, 10, 1.0), item(KeepAttention(), 30, 1.5), item(OFFLOAD, 0, 4.0)),
)


def test_dominated_choices_are_left_out() -> None:
    (front,) = fronts([MENU], UNITS, {})
    assert [(b.choice, b.kept_bytes) for b in front.bargains] == [(SAVE, 100), (RECOMPUTE, 10), (OFFLOAD, 0)]
    assert [b.extra_seconds for b in front.bargains] == pytest.approx([0.0, 1.0, 4.0])
    assert (front.units, front.count) == ("h.0-3", 4)


def test_what_the_plan_took_is_shown_even_where_another_beats_it() -> None:
    choices: dict[str, Choice] = {"h.0": KeepAttention(), "h.1": RECOMPUTE, "h.2": RECOMPUTE, "h.3": SAVE}
    (front,) = fronts([MENU], UNITS, choices)
    taken = {str(b.choice): b.taken for b in front.bargains}
    assert taken == {"save": 1, "keep_attention": 1, "recompute": 2, "offload": 0}
