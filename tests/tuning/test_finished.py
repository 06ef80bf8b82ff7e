"""A search that came to its end is answered from the record; asked for more, it goes on and says what changed."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from autockpt.schema import (
    RECOMPUTE,
    Plan,
    SearchOutcome,
    SearchRequest,
    SearchSpace,
    Trial,
    WorkloadSpec,
    parse_budget,
)
from autockpt.shipped import load_hardware
from autockpt.tuning import run_search, search_request
from tests.tuning import postgresql
from tests.tuning.made_up import Watcher
from tests.tuning.small import TWO_LAYERS, live, llama_in

pytestmark = pytest.mark.slow


def ask(out: Path, watcher: Watcher | None = None, **more: Any) -> tuple[SearchOutcome, list[str]]:
    """The outcome, and the stages that it took."""
    space = SearchSpace().restricted(("recompute", "offload"))
    asked = {"budget": parse_budget("60%act"), "workload": WorkloadSpec(model=TWO_LAYERS), "space": space}
    hardware = load_hardware("rtx4090")
    watcher = watcher or Watcher()
    request = SearchRequest.model_validate(asked | {"hardware": hardware, "trials": 2, "out": out} | more)
    return run_search(request, watcher), watcher.stages


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SearchOutcome]:
    """Where a search wrote, and what it found."""
    out = tmp_path_factory.mktemp("runs")
    return out, ask(out)[0]


def test_the_same_command_is_answered_at_once(finished: tuple[Path, SearchOutcome], tmp_path: Path) -> None:
    out, first = finished
    again, stages = ask(out, plan_out=tmp_path / "plan.yaml")
    assert stages == [] and again.plan is not None and first.plan is not None
    assert again.plan.hash == first.plan.hash == Plan.load(tmp_path / "plan.yaml").hash
    assert again.rows == first.rows and any("--fresh" in note for note in again.notes)


def test_a_moved_run_names_files_that_are_there(finished: tuple[Path, SearchOutcome], tmp_path: Path) -> None:
    (run,) = finished[0].iterdir()
    moved = tmp_path / "elsewhere"
    shutil.copytree(run, moved / run.name)
    plan = moved / run.name / "plan.yaml"

    def set_aside() -> Path | None:
        again, stages = ask(moved)
        assert stages == [] and again.plan is not None
        assert (again.run_directory, again.plan_path) == (plan.parent, plan)
        assert Plan.load(plan).hash == again.plan.hash
        return again.set_aside

    plan.write_text("# a person's\n" + plan.read_text())
    assert set_aside() is None and plan.read_text().startswith("# a person's")
    plan.unlink()
    assert set_aside() is None
    plan.write_text("")
    assert set_aside() == plan.with_name("plan.yaml.1")
    Plan(choices={"model.layers.*": RECOMPUTE}).save(plan, replace=True)
    assert set_aside() == plan.with_name("plan.yaml.2")
    assert plan.with_name("plan.yaml.1").read_text() == "" and set_aside() is None


def test_a_local_configuration_is_answered_unless_edited(tmp_path: Path) -> None:
    config = Path(llama_in(tmp_path / "model", vocab_size=64), "config.json")
    for model in (config.parent, config):
        asked = {"workload": WorkloadSpec(model=str(model), batch_size=2, seq_len=16)}
        stages = [ask(tmp_path / "runs", **asked)[1] for _ in range(2)]
        assert "trace" in stages[0] and stages[1] == []
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 5000.0}))
    _, stages = ask(tmp_path / "runs", workload=WorkloadSpec(model=str(config), batch_size=2, seq_len=16))
    assert "profile" in stages, "another configuration is another question"


class AskingElsewhere(Watcher):
    """Asks the same question in another folder while a trial of the first search runs."""

    def __init__(self, elsewhere: Path, storage: str) -> None:
        super().__init__()
        self._elsewhere, self._storage, self.second = elsewhere, storage, list[SearchOutcome]()

    def trial(self, trial: Trial, best: Trial | None) -> None:
        if trial.encoding == "knobs" and not self.second:
            self.second.append(ask(self._elsewhere, storage=self._storage)[0])


@pytest.fixture(params=["sqlite", "postgresql"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'studies.db'}"
        return
    with postgresql.server() as url:
        yield url


def test_searches_that_share_a_storage_do_not_interfere(storage: str, tmp_path: Path) -> None:
    first = AskingElsewhere(tmp_path / "b", storage)
    outcome = ask(tmp_path / "a", first, storage=storage)[0]
    (second,) = first.second
    assert outcome.plan is not None and second.plan is not None and outcome.plan.hash == second.plan.hash
    studies = {
        name: optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)
    }
    assert len(studies) == 2
    assert {trial.state.name for study in studies.values() for trial in study.trials} == {"COMPLETE"}
    written = [path for run in "ab" for path in (tmp_path / run).rglob("*") if path.is_file()]
    assert written and not any(postgresql.PASSWORD.encode() in path.read_bytes() for path in written)


def test_asked_for_more_it_goes_on(finished: tuple[Path, SearchOutcome]) -> None:
    out, first = finished
    again, stages = ask(out, trials=3)
    assert "search" in stages and first.measured_trials == again.resumed <= again.measured_trials


def test_a_live_search_is_answered_from_its_record_too(tmp_path: Path) -> None:
    step = live()

    def asked(**more: Any) -> tuple[Plan, list[str]]:
        watcher = Watcher()
        request = search_request(budget="50%act", step=step, choices=("recompute",), trials=1, out=tmp_path, **more)
        found = run_search(request, watcher)
        assert found.plan is not None
        return found.plan, watcher.stages

    first, _ = asked()
    second, stages = asked()
    assert second.hash == first.hash and "profile" not in stages
    _, stages = asked(fresh=True)
    assert "profile" in stages


def test_op_times_that_steps_contradict_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCKPT_CACHE", str(tmp_path))

    def asked() -> tuple[bool, bool]:
        """Whether op times were measured, and whether the steps were said to contradict them."""
        watcher = Watcher()
        found = run_search(search_request(budget="50%act", step=live(), choices=("recompute",), trials=1), watcher)
        return "time single ops" in watcher.stages, any("measures op times again" in note for note in found.notes)

    assert asked()[0]
    for kept in tmp_path.glob("op_times/*.json"):
        times = json.loads(kept.read_text())
        times["seconds"] = {op: 100.0 for op in times["seconds"]}
        kept.write_text(json.dumps(times))
    assert asked() == (False, True)
    assert asked()[0]
