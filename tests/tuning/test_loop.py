"""The search keeps its promises on a made-up device whose optimum is known."""

import math
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from autockpt.cost import CostModel
from autockpt.errors import DeviceOutOfMemory, InfeasibleError, MeasurementError, RunDirectoryError
from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.statistics import ratio_interval
from autockpt.schema import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    Measurement,
    OpTimes,
    SearchRequest,
    Silence,
    parse_budget,
    parse_choice,
    plan_hash,
)
from autockpt.schema.baselines import ALL, EVERY_2, NONE, baseline_plans
from autockpt.schema.run_directory import RunDirectory
from autockpt.tuning.clock import Clock
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.targets.base import Target
from autockpt.tuning.targets.measured import Measured
from autockpt.tuning.trials import Candidate, Result, Trials
from tests.errors import raises
from tests.samples import environment
from tests.tuning.device import MadeUpDevice
from tests.tuning.made_up import Watcher, search

pytestmark = pytest.mark.slow


def run_in(tmp_path: Path) -> RunDirectory:
    return RunDirectory.enter(tmp_path / "run", {"question": "q"})


@pytest.mark.parametrize("simulated", [False, True])
def test_the_headroom_is_left_free(simulated: bool) -> None:
    whole = search(MadeUpDevice(), "60%act", simulated=simulated)
    found = search(MadeUpDevice(), "60%act", headroom="2%", simulated=simulated)
    assert whole.budget.headroom_bytes == 0 and not whole.budget.headroom and found.budget.headroom == "2%"
    assert found.budget.headroom_bytes == -(-whole.budget.bytes * 2 // 100)
    assert found.budget.bytes + found.budget.headroom_bytes == whole.budget.bytes
    scored = [t for t in found.trials.all if t.score is not None]
    assert all(t.feasible == (t.score.peak_bytes <= found.budget.bytes) for t in scored if t.score is not None)


def test_says_so_where_the_budget_does_not_bind() -> None:
    found = search(MadeUpDevice(), "100%")
    assert not found.binding
    assert found.best is not None and all(choice == SAVE for choice in found.best.choices.values())


def test_out_of_memory_is_one_trial_and_the_search_goes_on() -> None:
    full = MadeUpDevice().true_peak({})
    device = MadeUpDevice(capacity=full - 1)
    found = search(device, "60%act", trials=8)
    states = {t.name: t.state for t in found.trials.all}
    assert states["none"] == "out_of_memory"
    assert found.best is not None and found.best.feasible
    assert any("simulated" in note for note in found.target.notes)


@pytest.mark.parametrize(("unseen", "budget"), [(12, "50%act"), (40, "1%act")])
def test_missed_bytes_are_learned_from_the_baselines(unseen: int, budget: str) -> None:
    found = search(MadeUpDevice(unseen=unseen), budget, trials=8)
    assert found.best is not None and found.best.measured is not None
    assert found.best.measured.peak_bytes <= found.budget.bytes


def test_a_winner_that_fails_in_a_fresh_process_is_not_named() -> None:
    refused: list[str] = []

    def confirm(choices: Any, budget: int) -> Measurement:
        refused.append(plan_hash(choices))
        return Measurement(peak_bytes=budget + (1 if len(refused) == 1 else 0), step_seconds=1.0)

    found = search(MadeUpDevice(), "50%act", trials=8, confirm=confirm)
    assert found.best is not None
    assert found.best.plan_hash != refused[0]
    assert any("fresh process" in note for note in found.target.notes)


def test_where_a_limit_holds_a_new_worker_confirms_the_winner() -> None:
    worker = MagicMock(spec=WorkerMeasurer, environment=environment("cuda", enforces_limit=True))
    worker.measure.return_value = Measurement(peak_bytes=7, step_seconds=1.0)
    target = Measured(SearchRequest(budget=parse_budget("8KB")), Clock(Silence()), worker)
    assert target.confirm({}, 8000) == worker.measure.return_value
    assert [call[0] for call in worker.method_calls if call[0] in ("release", "measure")] == ["release", "measure"]
    assert worker.measure.call_args.kwargs["budget_bytes"] == 8000


class Killed(MadeUpDevice):
    def measure(self, *args: Any, **kwargs: Any) -> Measurement:
        if self.measured:
            raise SystemExit
        return super().measure(*args, **kwargs)


def test_a_search_killed_early_calls_nothing_fitting(tmp_path: Path) -> None:
    run, budget = run_in(tmp_path), "auto"
    with pytest.raises(SystemExit):
        search(Killed(), budget, run=run)
    assert [t.feasible for t in run.trials() if t.measured is not None] == [None] and run.best() == []
    found = search(MadeUpDevice(), budget, run=run)
    assert all(t.feasible is not None for t in found.trials.all) and found.trials.resumed


class NotANumber(MadeUpDevice):
    def measure(self, *args: Any, **kwargs: Any) -> Measurement:
        return super().measure(*args, **kwargs).model_copy(update={"loss_is_finite": False})


def test_a_loss_that_is_no_number_is_said_once() -> None:
    for device, said in ((NotANumber(), 1), (MadeUpDevice(), 0)):
        watcher = Watcher()
        found = search(device, "50%act", trials=8, listener=watcher)
        assert found.best is not None and found.best.feasible
        for told in (found.trials.notes, watcher.notes):
            assert sum("not a finite number" in note for note in told) == said


@pytest.mark.parametrize(("after", "named"), [(0, None), (2, "recompute all"), (5, "recompute all")])
def test_an_interrupt_keeps_everything_and_names_one_that_fits(after: int, named: str | None) -> None:
    device = MadeUpDevice()
    device.interrupt_after = after
    found = search(device, "50%act")
    assert found.interrupted and found.binding and len(found.trials.all) == after
    assert (found.best is None) == (named is None)
    if found.best is not None and found.best.measured is not None:
        assert found.best.measured.peak_bytes <= found.budget.bytes
        assert after != 2 or found.best.name == named, "of the two that are known by then"


def test_the_same_question_again_goes_on_where_it_stopped(tmp_path: Path) -> None:
    device = MadeUpDevice()
    device.interrupt_after = 5
    assert len(search(device, "50%act", run=run_in(tmp_path)).trials.all) == 5 == len(run_in(tmp_path).trials())
    device.interrupt_after = None
    found = search(device, "50%act", run=run_in(tmp_path))
    hashes = [plan_hash(c) for c in device.measured]
    assert found.trials.resumed == 5 and len(hashes) == len(set(hashes)) and found.best is not None
    assert [t.number for t in found.trials.all] == list(range(len(found.trials.all)))


def test_a_corrupt_study_is_an_error_and_stays_unchanged(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    damaged = run.path / "study.db"
    damaged.write_bytes(b"this is no database" * 100)
    device = MadeUpDevice()
    with raises(RunDirectoryError):
        search(device, "50%act", run=run)
    assert device.measured == []
    assert damaged.read_bytes() == b"this is no database" * 100


def test_trials_are_written_and_heard_with_their_choices(tmp_path: Path) -> None:
    watcher = Watcher()
    run = run_in(tmp_path)
    found = search(MadeUpDevice(), "50%act", trials=8, run=run, listener=watcher)
    assert [t.number for t in watcher.trials] == [t.number for t in run.trials()]
    assert watcher.stages[1:4] == ["baselines", "search", "finals"]
    assert watcher.total is not None and 0 < watcher.steps <= watcher.total, "the finals say how far they are"
    assert found.best is not None and run.trials()[found.best.number].measured == found.best.measured


def test_saving_everything_is_timed_in_the_winners_rounds() -> None:
    device = MadeUpDevice(noise=0.02)
    found = search(device, "50%act")
    rows = {t.name: t for t in found.trials.all if t.encoding == "baseline" and t.measured is not None}
    fitting = [t for t in rows.values() if t.feasible]
    fastest = min(fitting, key=lambda t: t.measured.step_seconds)  # type: ignore[union-attr]
    assert found.best is not None and found.best.measured is not None and len(rows) >= 3
    ours = found.best.measured
    for row in (rows["none"].measured, fastest.measured):
        assert row is not None and len(row.times) >= 3
        in_turns = ratio_interval(row.times, ours.times[: len(row.times)])
        assert row.step_seconds / ours.step_seconds == pytest.approx(in_turns.value, rel=0.03)


def test_baselines_follow_the_machines_drift() -> None:
    class Slower(MadeUpDevice):
        def compare(self, *args: Any, **more: Any) -> dict[str, list[float]]:
            return {name: [2 * t for t in times] for name, times in super().compare(*args, **more).items()}

    found = [search(device, "50%act").trials.all for device in (MadeUpDevice(), Slower())]
    before, after = ({t.name: t.measured for t in trials if t.encoding == "baseline"} for trials in found)
    for name, row in before.items():
        assert row is not None and after[name].step_seconds == pytest.approx(2 * row.step_seconds, rel=0.02)


def test_a_baseline_that_seems_as_fast_as_the_winner_is_timed_beside_it() -> None:
    class SlowAtFirst(MadeUpDevice):  # so that baselines seem faster by what saving everything takes in the finals
        def measure(self, choices: Any, **more: Any) -> Measurement:
            found = super().measure(choices, **more)
            return found.rescaled(2.0) if len(self.measured) == 1 else found

    found = search(SlowAtFirst(), "50%act")
    best = found.best
    assert best is not None and best.measured is not None
    fits = [t for t in found.trials.all if t.feasible and t.encoding == "baseline"]
    assert fits and all(t.score_seconds >= best.score_seconds for t in fits)


def test_the_number_of_trials_counts_candidates_alone() -> None:
    found = search(MadeUpDevice(8, noise=0.01), "50%act", trials=1)
    assert sum(t.encoding == "knobs" and t.measured is not None for t in found.trials.all) == 1


def test_the_time_limit_holds_and_still_names_a_plan() -> None:
    clock = Clock(Silence(), 50)
    clock.began -= 51  # tracing and profiling took all of it
    device = MadeUpDevice(noise=0.05)
    found = search(device, "50%act", clock=clock)
    # what the profile took its time for is tried once, and named
    (tried,) = [t for t in found.trials.all if t.encoding != "baseline"]
    assert "time limit" in found.stopped
    assert found.best is not None and found.best.measured is not None and found.best.number == tried.number
    assert found.best.measured.steps == 1 and any("interleaved" in note for note in found.target.notes)
    assert sum(t.encoding == "baseline" for t in found.trials.all) == 2, "those that say what the budget means"


@pytest.mark.parametrize(("steps", "fewer"), [(10, True), (10**9, False), (None, False)])
def test_a_short_training_shortens_its_search(steps: int | None, fewer: bool) -> None:
    watcher, device = Watcher(), MadeUpDevice()
    clock = Clock(watcher, 3600, steps)
    clock.began -= 1800
    found = search(device, "50%act", clock=clock)
    fastest = min(t.measured.step_seconds for t in found.trials.all if t.encoding == "baseline" and t.measured)
    assert sum(t.encoding == "baseline" for t in found.trials.all) == 5 and found.best is not None
    assert clock.timeout == (pytest.approx(fastest, rel=0.01) if fewer else 3600)  # a tenth of ten steps
    assert ("time limit" in found.stopped) == fewer == any("a tenth of 10 steps" in note for note in watcher.notes)


def test_plans_from_elsewhere_are_tried_first_and_scored_here() -> None:
    device = MadeUpDevice()
    choices = {name: RECOMPUTE if i < 5 else SAVE for i, name in enumerate(device.names)}
    found = search(device, "60%act", trials=8, seeds={"simulated plan": choices})
    seed = next(t for t in found.trials.all if t.encoding == "seed")
    assert seed.choices == choices and seed.measured is not None
    assert seed.measured.step_seconds == device.true_seconds(choices)
    assert all(t.encoding in ("baseline", "seed") for t in found.trials.all[: seed.number + 1])


def test_a_seed_plan_is_tried_before_a_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be leaner than all that the solver comes to."""
    device = MadeUpDevice()
    lean = dict.fromkeys(device.names, RECOMPUTE)
    peak, most = device.trace(lean).peak_bytes, device.trace().peak_bytes
    monkeypatch.setattr(CostModel, "smallest_peak", lambda *asked, **more: most)
    monkeypatch.setattr(CostModel, "last_resorts", lambda *asked: [])
    with pytest.raises(InfeasibleError):
        search(device, f"{peak / 1000}KB", simulated=True)
    found = search(device, f"{peak / 1000}KB", simulated=True, seeds={"lean": lean})
    assert found.best is not None and found.best.feasible and found.proposer.smallest_peak == peak
    mixed = lean | {device.names[0]: SAVE}
    monkeypatch.setattr(CostModel, "last_resorts", lambda *asked: [mixed])
    found = search(device, f"{device.trace(mixed).peak_bytes / 1000}KB", simulated=True)
    assert (trial := found.trials.find(mixed)) is not None and trial.feasible and trial.encoding == "seed"


def test_a_seed_plan_with_choices_without_costs_is_no_obstacle() -> None:
    device = MadeUpDevice()
    odd = dict.fromkeys(device.names, parse_choice({"kind": "selective", "keep": ["f"]}))
    odd = {name: odd[name] if i == 0 else RECOMPUTE for i, name in enumerate(device.names)}
    found = search(device, "60%act", trials=8, seeds={"measured plan": odd})
    assert any(t.choices == odd for t in found.trials.all) and found.best is not None


@pytest.mark.parametrize(("swing", "said", "second_is"), [(1.01, False, 1.0), (1.8, True, 1.0), (1.8, True, 1.03)])
def test_timings_that_swing_are_said_to_come_of_other_processes(swing: float, said: bool, second_is: float) -> None:
    trials = Trials(None, Clock(Silence()))
    for number in range(2):
        measured = Measurement(peak_bytes=1, step_seconds=1.0, noise=0.05)
        candidate = Candidate({"0": SAVE if number else RECOMPUTE})
        trials.write(candidate, Result("measured", measured))
    trials.judge(parse_budget("1KB").resolved(0, 0, 1000, "cpu"))

    random = Random(0)

    def compare(plans: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        common = [random.uniform(1.0, swing) for _ in range(rounds)]
        return {n: [second_is ** int(n) * random.uniform(0.99, 1.01) * c for c in common] for n in plans}

    device: Any = SimpleNamespace(environment=SimpleNamespace(device=SimpleNamespace(kind="cpu")), compare=compare)
    target = Measured(None, Clock(Silence()), device)  # type: ignore[arg-type]
    target.winner(trials, [], math.inf)
    assert any("other processes" in note and "OMP_NUM_THREADS" in note for note in target.notes) is said


def test_a_plan_that_two_processes_ended_in_is_left_out(tmp_path: Path) -> None:
    """And a trial after which no other can be taken is on record."""

    class Deadly(MadeUpDevice):
        def measure(self, choices: Any, **more: Any) -> Measurement:
            if all(choice == OFFLOAD for choice in choices.values()):
                raise MeasurementError("a rank has left")
            if all(choice == RECOMPUTE for choice in choices.values()):
                error = DeviceOutOfMemory("on rank 1")
                error.last = MeasurementError("no other step")
                raise error
            return super().measure(choices, **more)

    run = run_in(tmp_path)
    for _ in range(3):
        with raises(MeasurementError):
            search(Deadly(), "50%act", run=run)
    found = search(Deadly(), "50%act", run=run)
    states = {trial.name: trial.state for trial in found.trials.all}
    assert found.best is not None and states["offload all"] == "failed"
    assert states["recompute all"] == "out_of_memory" and not run.in_flight()


def test_a_plan_measured_for_the_profile_is_not_measured_again() -> None:
    device = MadeUpDevice()
    plan = dict.fromkeys(device.names, RECOMPUTE)
    known = device.measure(plan)
    target = Measured(None, Clock(Silence()), device)  # type: ignore[arg-type]
    target.measured_before = {plan_hash(plan): known}
    device.measured.clear()
    assert target.evaluate(Candidate(plan), None) == target.evaluate(Candidate(plan), known.peak_bytes)
    assert target.evaluate(Candidate(plan), None).measured == known and not device.measured
    target.evaluate(Candidate(plan), known.peak_bytes - 1)  # which only a real limit tells
    assert device.measured == [plan]


def test_baselines_that_are_no_rivals_are_measured_briefly() -> None:
    device = MadeUpDevice(8)
    found = search(device, "50%act")
    rows = {t.name: t for t in found.trials.all if t.encoding == "baseline" and t.measured and t.predicted}
    fitting = [t.predicted.step_seconds for t in rows.values() if t.predicted.peak_bytes <= found.budget.bytes]  # type: ignore[union-attr]
    brief = [t for t in rows.values() if t.measured.steps == 1]  # type: ignore[union-attr]
    assert brief and not {NONE, ALL} & {t.name for t in brief}
    for trial in brief:
        assert not trial.feasible or trial.predicted.step_seconds > 1.05 * min(fitting)  # type: ignore[union-attr]


def test_a_plan_over_the_host_budget_is_no_rival() -> None:
    """Offloading every layer would be faster than recomputing every second one, which is measured briefly for that."""

    class FastCopies(MadeUpDevice):
        def believed(self, **more: Any) -> OpTimes:
            return super().believed(copy_out_bandwidth=1e6, copy_in_bandwidth=1e6)

        def measure(self, choices: Any, *, steps: int = 5, **more: Any) -> Measurement:
            asked[plan_hash(choices)] = steps
            return super().measure(choices, steps=steps, **more)

    every_2 = plan_hash(baseline_plans(MadeUpDevice().names, ("recompute",))[EVERY_2])
    for host_budget, brief in ((None, True), (1, False)):
        asked: dict[str, int] = {}
        search(FastCopies(), "50%act", host_budget=host_budget)
        assert (asked[every_2] == 1) is brief


def test_late_only_the_plans_that_a_budget_is_of_are_ghost_run() -> None:
    model, clock = MadeUpDevice().profiled(), Clock(Silence(), timeout=1e-9)
    request = SearchRequest(budget=parse_budget("50%act"))
    proposer = SolverProposer(request, model, Target(request), Trials(None, clock), {})
    proposer.begin()
    assert model.predictor.known(proposer.baselines[EVERY_2]) is None


@pytest.mark.parametrize("budget", ["30%act", "50%act", "80%act"])
def test_a_search_ends_when_the_plan_of_the_corrected_costs_was_tried(budget: str) -> None:
    device = MadeUpDevice(noise=0.01)
    found = search(device, budget)
    assert sum(t.encoding == "knobs" and t.measured is not None for t in found.trials.all) == 1
    tried = [trial.encoding for trial in found.trials.all]
    assert "solver" in tried[: tried.index("knobs")]  # a simple plan, as people write them
    assert found.stopped.startswith("with costs corrected by these trials")
    assert found.best is not None
    assert device.true_seconds(found.best.choices) <= 1.005 * device.optimum(found.budget.bytes)
