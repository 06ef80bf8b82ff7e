from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autockpt.diagnose.oom_log import read_log, read_text
from autockpt.schema import WorkloadSpec
from autockpt.schema.diagnosis import Diagnosis
from tests.diagnose.logs import FORWARD, message
from tests.reporting.test_diagnosis_view import no_plan_fits, planned


class Asked:
    """Stands for the package that simulates; remembers questions."""

    def __init__(self) -> None:
        self.questions: list[Any] = []
        self.answer: Diagnosis = planned()

    def diagnose(self, question: Any, listener: Any = None) -> Diagnosis:
        self.questions.append(question)
        return self.answer


@pytest.fixture
def asked(replace) -> Asked:
    stand_in = Asked()
    replace(
        "autockpt.diagnose",
        diagnose=stand_in.diagnose,
        DiagnoseRequest=SimpleNamespace,
        read_log=read_log,
    )
    return stand_in


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(FORWARD + message())
    return path


def test_the_job_is_described_as_for_a_search(autockpt, asked: Asked, log: Path) -> None:
    result = autockpt("diagnose", "run.log", "-m", "gpt2", "-b", "2", "--seq-len", "64")
    assert result.code == 0, result.err
    (question,) = asked.questions
    assert question.spec == WorkloadSpec(model="gpt2", batch_size=2, seq_len=64)
    assert question.log.failures[0].tried


def test_budget_and_hardware(autockpt, asked: Asked, log: Path) -> None:
    result = autockpt(
        "diagnose", "run.log", "-m", "gpt2", "--budget", "20GiB", "--hardware", "h100", "--plan-out", "p.yaml"
    )
    assert result.code == 0, result.err
    (question,) = asked.questions
    assert question.budget.size == 20 * 2**30 and question.hardware.name == "h100"
    assert question.plan_out == Path("p.yaml")


def test_json_is_the_whole_answer(autockpt, asked: Asked, log: Path) -> None:
    result = autockpt("diagnose", "run.log", "--model", "gpt2", "--json")
    assert result.code == 0 and result.json == asked.answer.model_dump(mode="json")


def test_where_no_plan_fits_the_exit_code_is_3(autockpt, asked: Asked, log: Path) -> None:
    asked.answer = no_plan_fits()
    result = autockpt("diagnose", "run.log", "--model", "gpt2")
    assert result.code == 3 and "No plan alone fits" in result.out


def test_a_model_that_cannot_be_built_is_an_error_beside_what_the_log_says(autockpt, asked: Asked, log: Path) -> None:
    asked.answer = Diagnosis(
        model="x", log=read_text(message()), verdict="GPU 0 ran out.", unprescribed="there is no model x\nName another."
    )
    result = autockpt("diagnose", "run.log", "--model", "x")
    assert result.code == 2 and "GPU 0 ran out." in result.out and "there is no model x" in result.out


def test_a_log_alone_is_told(autockpt, log: Path) -> None:
    result = autockpt("diagnose", "run.log")
    assert (
        result.code == 0
        and "in the forward pass" in result.out
        and "no model was named" in " ".join(result.out.split())
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'LOG'"),
        (("absent.log",), "cannot be read"),
        (("run.log", "--budget", "60%", "-m", "gpt2"), "share of a peak"),
        (("run.log", "--budget", "24"), "no"),
        (("run.log", "--plan-out", "p.yaml"), "needs a model"),
        (("run.log", "-m", "gpt2", "--hardware", "rtx9999"), "no hardware"),
        (("quiet.log",), "no message of PyTorch's that memory ran out"),
        (("snapshot.pickle",), "docs.pytorch.org/memory_viz"),
        (("packed.zip",), "a zip archive"),
        ((".",), "cannot be read"),
    ],
)
def test_bad_input_is_a_clear_error(autockpt, log: Path, tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "quiet.log").write_text("all went well\n")
    (tmp_path / "snapshot.pickle").write_bytes(b"\x80\x04}.")
    (tmp_path / "packed.zip").write_bytes(b"PK\x03\x04rest")
    result = autockpt("diagnose", *arguments)
    assert result.code == 2 and said in " ".join(result.err.split()), result.err
