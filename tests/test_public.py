"""Python asks what the command line asks, by the same names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autockpt
from autockpt.analysis import explain as explaining
from autockpt.errors import UsageError
from autockpt.schema import SearchSpace
from tests.errors import raises

pytestmark = pytest.mark.slow

FEW = ("save", "recompute")
JOB = {"batch_size": 4, "seq_len": 64}


def test_a_model_by_name_is_planned_explained_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explaining, "SearchSpace", lambda: SearchSpace(choices=FEW))
    plan = autockpt.search(
        "llama-tiny", budget="60%act", hardware="rtx4090", trials=1, choices=FEW, out=tmp_path, progress=False, **JOB
    )
    assert plan.status == "simulated"
    assert plan.workload is not None and plan.workload.batch_size == 4
    assert capsys.readouterr().err == ""
    (directory,) = tmp_path.iterdir()
    assert autockpt.open_run(directory).plan() == plan and (directory / "report.html").is_file()
    said = autockpt.explain(directory)
    assert said.choices == plan.expand_planned()
    assert said.device.startswith("NVIDIA GeForce RTX 4090")
    traced = autockpt.explain(model="llama-tiny", hardware="rtx4090", show=False, **JOB)
    assert traced.settings["device"] == said.settings["device"] == "rtx4090, simulated"
    assert "llama-tiny" in capsys.readouterr().out


def test_a_live_step_gets_micro_batch_progress_and_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = autockpt.Step(model, torch.randn(1, 32), loss=lambda model, batch: model(batch).square().mean())
    plan = autockpt.search(step, budget="1MB", global_batch=2, trials=1, timeout=20, choices=FEW, out=tmp_path)
    size, times = plan.settings["batch_size"], plan.settings["accumulate"]
    assert (size, times) in ((1, 2), (2, 1)) and plan.status == "measured"
    said = capsys.readouterr().err
    assert "trace" in said and "rows/s" in said and "100 %" in said and "summed in another order" in said
    assert all(autockpt.trace(step, path.parent).ops for path in tmp_path.glob("*/plan.yaml"))  # a run's directory
    pages = [page.read_text() for page in tmp_path.glob("*/report.html")]
    assert pages and all("faster than" in p or "slower than" in p or "as fast as" in p for p in pages)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    autockpt.apply(model, plan).remove()


@pytest.mark.parametrize(
    ("asked", "word"),
    [({"hardware": "rtx4090"}, "hardware="), ({"device": "cpu"}, "device="), ({"batch_size": 2}, "batch_size=")],
)
def test_what_does_not_go_with_a_live_step_is_refused_by_name(asked: dict[str, Any], word: str) -> None:
    step = autockpt.Step(nn.Linear(2, 2), torch.ones(1, 2), loss=lambda model, batch: model(batch).sum())
    with raises(UsageError, word):
        autockpt.search(step, budget="1GB", progress=False, **asked)


def test_what_is_no_step_is_an_error_with_a_remedy() -> None:
    with raises(UsageError, "Linear", "autockpt.Step(model, batch"):
        autockpt.search(nn.Linear(2, 2), budget="1GB", progress=False)  # type: ignore[arg-type]
    with raises(UsageError, "str", "autockpt.Step"):
        autockpt.trace("llama-tiny")  # type: ignore[arg-type]
    with raises(UsageError, "batchsize", "batch_size"):
        autockpt.search("llama-tiny", budget="1GB", hardware="rtx4090", progress=False, batchsize=2)
    with raises(UsageError, "model="):
        autockpt.explain(budget="1GB")
