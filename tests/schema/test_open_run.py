from __future__ import annotations

from pathlib import Path

import pytest

import autockpt
from autockpt.errors import RunDirectoryError
from tests.analysis.samples import make_run
from tests.errors import raises


def test_a_run_in_python(tmp_path: Path) -> None:
    run = autockpt.open_run(make_run(tmp_path).path)
    assert [t.number for t in run.trials] == [0, 1, 2, 3] and run.question["budget"] == "60%act"
    assert [t.number for t in run.pareto_front] == [1, 2, 0] and [t.number for t in run.best(2)] == [2, 1]
    assert run.plan is not None and run.plan.hash == run.trials[2].plan_hash and "4 trials" in repr(run)
    plan = run.plan_of(1)
    assert str(plan.choices["h.0-1"]) == "recompute" and plan.status == "measured"
    plan.save(tmp_path / "plan.yaml")
    assert autockpt.Plan.load(tmp_path / "plan.yaml").hash == run.trials[1].plan_hash
    with raises(RunDirectoryError):
        run.plan_of(9)
    with pytest.raises(RunDirectoryError):
        autockpt.open_run(tmp_path)
