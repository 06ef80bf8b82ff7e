from __future__ import annotations

import pytest

from autockpt.errors import RunDirectoryError
from autockpt.schema import Measurement, SearchSpace, Trial, load_space
from autockpt.tuning.study import Study


@pytest.mark.parametrize("storage", ["nonsense", "nosuchdriver://someone:secret@nowhere/db"])
def test_a_storage_that_cannot_be_opened_is_named_without_its_password(storage: str) -> None:
    with pytest.raises(RunDirectoryError, match="cannot be opened") as caught:
        Study(load_space("knobs"), {"a": [], "b": []}, name="search", storage=storage, seed=0)
    assert "secret" not in str(caught.value) and "sqlite:///" in caught.value.remedy
    assert caught.value.exit_code == 2


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
