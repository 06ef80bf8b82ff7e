from __future__ import annotations

import sqlite3
from pathlib import Path

import optuna
import pytest

from autockpt.errors import RunDirectoryError
from autockpt.schema import Measurement, SearchSpace, Trial, load_space
from autockpt.tuning.study import Study


@pytest.mark.parametrize("storage", ["nonsense", "nosuchdriver://someone:secret@nowhere/db"])
def test_a_storage_that_cannot_be_opened_is_named_without_its_password(storage: str) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be used") as caught:
        Study(load_space("knobs"), {"a": [], "b": []}, name="search", storage=storage, seed=0)
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

    space = load_space("knobs")
    study = Study(space, {}, name="search", storage=f"sqlite:///{tmp_path / 'study.db'}", seed=0)
    monkeypatch.setattr(study._study, "ask", commit)
    for used in (study.ask, lambda: Study(space, {}, name="search", storage="sqlite:///x.db", seed=0)):
        with pytest.raises(RunDirectoryError, match="is full") as caught:
            used()
        assert "Free space" in caught.value.remedy and "invalid" not in str(caught.value)
        monkeypatch.setattr(optuna, "create_study", commit)


@pytest.mark.parametrize("sampler", ["gp", "tpe", "nsga2", "random"])
def test_every_sampler_stays_within_the_knobs_and_takes_trials_that_did_not_fit(sampler: str) -> None:
    space = SearchSpace.model_validate(load_space("knobs").model_dump() | {"sampler": sampler})
    study = Study(space, {}, name="search", storage=None, seed=0)
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
