from pathlib import Path

import pytest

from autockpt.schema import Plan
from tests.analysis.samples import make_run
from tests.samples import UNITS, choices


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    Plan.create(choices(), UNITS).save(tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


def test_settings_are_printed_with_what_is_lost(autockpt, plan: Path) -> None:
    result = autockpt("export", "plan.yaml", "--to", "axolotl")
    assert result.code == 0 and not result.err
    assert "gradient_checkpointing: true" in result.out and "What is lost:" in result.out
    as_json = autockpt("export", "plan.yaml", "--to", "axolotl", "--json").json
    assert as_json["settings"] == result.out and as_json["losses"]


def test_a_runs_plan_is_named_by_its_directory(autockpt, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    by_file = autockpt("export", str(run.path / "plan.yaml"), "--to", "transformers")
    assert by_file.code == 0 and autockpt("export", str(run.path), "--to", "transformers").out == by_file.out
