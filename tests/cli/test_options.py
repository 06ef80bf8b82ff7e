import re
from pathlib import Path

import pytest

from autockpt.cli.options import WORKLOAD_OPTIONS, duration, job_file
from autockpt.errors import UsageError
from autockpt.schema import WorkloadSpec
from autockpt.schema.workload import OPTIONS, as_option, described_by
from tests.errors import raises


def test_every_workload_field_is_an_option_or_a_listed_key() -> None:
    assert tuple(WORKLOAD_OPTIONS) == OPTIONS
    page = (Path(__file__).parents[2] / "docs" / "job.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)`(?: \(`(--[\w-]+)`[^)]*\))? \|", page, re.M))
    assert set(rows) == set(WorkloadSpec.model_fields)
    assert {field: as_option(field) for field in OPTIONS} | {"seed": "--seed"} == {k: v for k, v in rows.items() if v}


def test_options_take_precedence_over_a_job_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("batch_size: 4\nquantization:\n  load_in_8bit: true\nlora: 16\nshard: 2\n")
    spec = described_by(job_file(path) | {"model": "llama-tiny", "lora": 8})
    assert (spec.model, spec.batch_size, spec.lora, spec.shard) == ("llama-tiny", 4, 8, 2)
    assert spec.quantization == {"load_in_8bit": True}


@pytest.mark.parametrize(
    ("text", "line"), [("", 1), ("- 1", 1), ("model: x\nbatchsize: 4", 2), ("model: x\nlora: -1", 2), ("a: [", 1)]
)
def test_a_wrong_job_file_is_an_error_at_its_line(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with raises(UsageError, f"job.yaml:{line}"):
        job_file(path)


def test_options_lie_over_a_plans_own() -> None:
    base = WorkloadSpec(model="llama-tiny", batch_size=4, packed=True)
    spec = described_by({"batch_size": 8, "packed": False}, base)
    assert (spec.model, spec.batch_size, spec.packed) == ("llama-tiny", 8, False)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("0.5", 0.5)])
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-3", "0", "3d", "1e3", "10 m", "nan"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        duration(text)
    assert duration(None) is None
