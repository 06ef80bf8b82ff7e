import sqlite3
import sys
from pathlib import Path

import optuna
import pytest

from autockpt.errors import RunDirectoryError
from autockpt.schema import RECOMPUTE, SAVE
from autockpt.tuning.proposers.sampler import RANGES, Study, sampler_for
from tests.children import Say, forked
from tests.errors import raises
from tests.samples import trial


def knobs_study(storage: str | None) -> Study:
    return Study(sampler_for(0), RANGES, name="search", storage=storage)


@pytest.mark.parametrize("storage", ["nonsense", "nosuchdriver://someone:secret@nowhere/db"])
def test_a_storage_that_fails_is_named_without_its_password(storage: str) -> None:
    with raises(RunDirectoryError) as caught:
        knobs_study(storage)
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

    study = knobs_study(f"sqlite:///{tmp_path / 'study.db'}")
    monkeypatch.setattr(study._study, "ask", commit)
    for used in (study.ask, lambda: knobs_study("sqlite:///x.db")):
        with raises(RunDirectoryError) as caught:
            used()
        assert "Free space" in caught.value.remedy and "invalid" not in str(caught.value)
        monkeypatch.setattr(optuna, "create_study", commit)


@pytest.mark.slow
def test_points_that_nobody_asked_for_leave_no_trial_behind(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    point = {"margin": 0.01, "recompute_price": 1.0, "offload_price": 1.0, "hidden_copies": 0.0}
    study = knobs_study(storage)
    study.enqueue([point, {**point, "margin": 0.02}])
    number, first = study.ask()
    assert first == point
    study.fail(number)
    killed = optuna.load_study(study_name="search", storage=storage)
    assert [t.state.name for t in killed.trials] == ["FAIL"]
    killed.ask()
    knobs_study(storage)
    states = [t.state.name for t in optuna.load_study(study_name="search", storage=storage).trials]
    assert states == ["FAIL", "FAIL"]


@pytest.mark.slow
def test_the_study_records_trials_in_readable_units(tmp_path: Path) -> None:
    study = knobs_study(storage := f"sqlite:///{tmp_path / 'study.db'}")
    number, _ = study.ask()
    study.tell(number, 0.448, 0.01, trial(1, choices={"h.0": RECOMPUTE, "h.1": RECOMPUTE, "h.2": SAVE}))
    kept = optuna.load_study(study_name="search", storage=storage)
    assert kept.metric_names == ["step seconds"] and kept.trials[0].value == 0.448
    attributes = kept.trials[0].user_attrs
    assert attributes["choices"] == {"h.0-1": "recompute", "h.2": "save"} and attributes["trial"] == 1
    assert attributes["peak MiB"] == pytest.approx(440.7, abs=0.01) and attributes["state"] == "measured"


_CALLER = """
import gc, weakref

class Model: pass

def proposes():
    model = Model()
    from autockpt.tuning.proposers.sampler import RANGES, Study, sampler_for
    from tests.samples import trial
    study = Study(sampler_for(0), RANGES, name="search", storage=None)
    for n in range(6):
        study.tell(study.ask()[0], 1.0 + n, -0.5, trial(number=n))
    return weakref.ref(model)

model = proposes()
gc.collect()
assert model() is None
"""


@pytest.mark.slow
def test_no_frame_of_the_first_caller_is_kept() -> None:
    """In a process that is to import Optuna again: it keeps exceptions of imports that failed."""

    def imports(say: Say) -> None:
        for name in [*sys.modules]:
            if name.startswith(("optuna", "autockpt.tuning")):
                del sys.modules[name]
        say(exec(_CALLER, {}))

    assert forked(imports).receive() is None
