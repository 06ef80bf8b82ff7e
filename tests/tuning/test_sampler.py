from __future__ import annotations

import itertools
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from autockpt.errors import RunDirectoryError
from autockpt.schema import RECOMPUTE, SAVE, Measurement, ResolvedBudget, Trial
from autockpt.tuning.proposers.sampler import MIB, Study, show_trials
from search_spaces.spaces import load_space
from tests.reporting.samples import trial


@pytest.mark.parametrize("storage", ["nonsense", "nosuchdriver://someone:secret@nowhere/db"])
def test_a_storage_that_cannot_be_opened_is_named_without_its_password(storage: str) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be used") as caught:
        Study("knobs", "gp", load_space("knobs").knobs, {}, name="search", storage=storage, seed=0)
    assert "secret" not in str(caught.value) and "sqlite:///" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_a_full_disk_is_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(*_: object, **__: object) -> None:
        connection = sqlite3.connect(tmp_path / "full.db")
        connection.execute("pragma max_page_count = 2")
        try:
            connection.execute("create table t as select zeroblob(100000)")
        except sqlite3.OperationalError as error:
            raise optuna.exceptions.StorageInternalError("This happens due to invalid data in the commit") from error
        finally:
            connection.close()

    def opened(storage: str) -> Study:
        return Study("knobs", "gp", load_space("knobs").knobs, {}, name="search", storage=storage, seed=0)

    study = opened(f"sqlite:///{tmp_path / 'study.db'}")
    monkeypatch.setattr(study._study, "ask", commit)
    for used in (study.ask, lambda: opened("sqlite:///x.db")):
        with pytest.raises(RunDirectoryError, match="is full") as caught:
            used()
        assert "Free space" in caught.value.remedy and "invalid" not in str(caught.value)
        monkeypatch.setattr(optuna, "create_study", commit)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["gp", "tpe", "nsga2", "random"])
def test_every_sampler_stays_within_the_knobs_and_takes_trials_that_did_not_fit(sampler: Any) -> None:
    space = load_space("knobs")
    study = Study("knobs", sampler, space.knobs, {}, name="search", storage=None, seed=0)
    record = Trial(number=0, name="t", encoding="knobs", choices={}, plan_hash="h", state="measured", feasible=True)
    record = record.model_copy(update={"measured": Measurement(peak_bytes=1, step_seconds=1.0)})
    margins = []
    for i in range(15):
        number, point = study.ask()
        assert point.keys() == space.knobs.keys()
        assert all(knob.low <= float(point[name]) <= knob.high for name, knob in space.knobs.items())
        study.tell(number, 1.0 + float(point["margin"]), 0.5 if i % 3 == 0 else -0.5, record)
        margins.append(point["margin"])
    assert len(set(margins)) > 5


@pytest.mark.slow
def test_points_that_nobody_asked_for_leave_no_trial_behind(tmp_path: Path) -> None:
    def opened() -> Study:
        return Study("knobs", "random", load_space("knobs").knobs, {}, name="search", storage=storage, seed=0)

    storage = f"sqlite:///{tmp_path / 'study.db'}"
    point = {"margin": 0.01, "recompute_price": 1.0, "offload_price": 1.0, "hidden_copies": 0.0}
    study = opened()
    study.enqueue([point, {**point, "margin": 0.02}])
    number, first = study.ask()
    assert first == point
    study.fail(number)
    killed = optuna.load_study(study_name="search", storage=storage)
    assert [t.state.name for t in killed.trials] == ["FAIL"]
    killed.enqueue_trial(point)  # as earlier versions left them
    opened()
    states = [t.state.name for t in optuna.load_study(study_name="search", storage=storage).trials]
    assert states == ["FAIL", "FAIL"]


@pytest.mark.slow
def test_people_see_every_trial_once_with_what_their_tools_plot(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    budget = ResolvedBudget(asked="60%", bytes=int(440 * MIB))
    trials = [
        trial(
            0, encoding="baseline", name="recompute all", choices=dict.fromkeys("abc", RECOMPUTE), elapsed_seconds=3.0
        ),
        trial(1, choices={"a": RECOMPUTE, "b": SAVE, "c": SAVE}, parameters={"margin": 0.02}, elapsed_seconds=5.0),
        trial(2, state="failed", measured=None, message="it raised", elapsed_seconds=9.0),
    ]
    for _ in range(2):  # a second time it takes the place of the first
        show_trials(storage, "a question", trials, budget)
    study = optuna.load_study(study_name="a question", storage=storage)
    assert study.metric_names == ["step seconds", "peak MiB"] and study.user_attrs["budget"] == "60%"
    everything, knobs, failed = study.trials
    assert everything.params["recompute layers"] == 3 and knobs.params["recompute layers"] == 1
    assert knobs.values == [0.448, pytest.approx(440.7, abs=0.01)] and knobs.user_attrs["margin"] == 0.02
    assert knobs.constraints["over budget"] == pytest.approx(0.7 / 440, abs=1e-4) and not study.best_trials
    assert knobs.user_attrs["a"] == "recompute" and knobs.user_attrs["b"] == "save"
    assert all(t.duration for t in study.trials)
    ran = itertools.pairwise(study.trials)
    assert all(earlier.datetime_complete == later.datetime_start for earlier, later in ran)  # one after the other
    assert failed.state.name == "FAIL" and failed.user_attrs["why"] == "it raised"


_CALLER = """
import gc, weakref

class Model: pass

def proposes():
    model = Model()
    from autockpt.tuning.proposers.sampler import Study
    from search_spaces.spaces import load_space
    from tests.reporting.samples import trial
    study = Study("knobs", "gp", load_space("knobs").knobs, {}, name="search", storage=None, seed=0)
    for n in range(6):
        study.tell(study.ask()[0], 1.0 + n, -0.5, trial(number=n))
    return weakref.ref(model)

model = proposes()
gc.collect()
assert model() is None
"""


@pytest.mark.slow
def test_nothing_keeps_the_frames_of_whoever_is_the_first_to_search() -> None:
    """In a process that has not imported Optuna yet: it keeps exceptions of imports that failed."""
    done = subprocess.run([sys.executable, "-c", _CALLER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_knob_that_is_left_out_is_in_no_further_point() -> None:
    study = Study("knobs", "gp", load_space("knobs").knobs, {}, name="search", storage=None, seed=0)
    study.leave_out("hidden_copies")
    study.leave_out("nothing of this name")
    study.enqueue([{"margin": 0.01, "recompute_price": 1.0, "offload_price": 1.0, "hidden_copies": 0.0}])
    points = [study.ask()[1] for _ in range(3)]
    assert points[0] == {"margin": 0.01, "recompute_price": 1.0, "offload_price": 1.0}
    assert all(point.keys() == points[0].keys() for point in points)
