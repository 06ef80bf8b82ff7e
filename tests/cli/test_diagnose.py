from pathlib import Path
from unittest.mock import Mock

import pytest

from autockpt.analysis import diagnose as diagnosing
from autockpt.analysis.diagnose import Diagnosis, advice_of, verdict_of
from autockpt.analysis.explanation import Holding
from autockpt.analysis.oom_log import read_text
from autockpt.cli.diagnose import print_diagnosis
from autockpt.schema import WorkloadSpec
from tests.analysis.logs import FORWARD, message
from tests.samples import printed

GIB = 2**30


def _base() -> Diagnosis:
    log = read_text(FORWARD + message())
    return Diagnosis(
        log=log,
        verdict=verdict_of(log),
        advice=tuple(advice_of(log)),
        holdings=(
            Holding(name="weights", peak_bytes=3 * GIB, most_bytes=3 * GIB),
            Holding(name="kept for backward", peak_bytes=22 * GIB, most_bytes=22 * GIB),
        ),
        agreement="It had to fail.",
        terms="For 24 GiB of a device with 25 GiB.",
        notes=("a remark",),
    )


def no_plan_fits() -> Diagnosis:
    return _base().model_copy(update={"refusal": "nothing fits 24 GiB\nUse a smaller batch."})


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, printed(print_diagnosis, no_plan_fits(), width=width).splitlines())) <= width


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stands for the package that simulates."""
    monkeypatch.setattr(diagnosing, "diagnose", stand_in := Mock(return_value=_base()))
    return stand_in


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "run.log"
    path.write_text(FORWARD + message())
    return path


def test_the_job_is_described_as_for_a_search(autockpt, asked: Mock, log: Path) -> None:
    where = ("--hardware", "h100", "--plan-out", "p.yaml")
    result = autockpt("diagnose", "run.log", "-m", "gpt2", "-b", "2", "--seq-len", "64", *where)
    assert result.code == 0, result.err
    log, spec = asked.call_args.args
    assert spec == WorkloadSpec(model="gpt2", batch_size=2, seq_len=64) and log.failure.tried
    options = asked.call_args.kwargs
    assert options["hardware"].name == "h100" and options["plan_out"] == Path("p.yaml")


def test_where_no_plan_fits_the_exit_code_is_3(autockpt, asked: Mock, log: Path) -> None:
    asked.return_value = no_plan_fits()
    result = autockpt("diagnose", "run.log", "--model", "gpt2")
    assert result.code == 3 and "nothing fits 24 GiB" in result.out


def test_an_unbuildable_model_is_an_error_beside_the_log(autockpt, asked: Mock, log: Path) -> None:
    asked.return_value = Diagnosis(
        log=read_text(message()), verdict="GPU 0 ran out.", no_plan="there is no model x\nName another."
    )
    result = autockpt("diagnose", "run.log", "--model", "x")
    assert result.code == 2 and "GPU 0 ran out." in result.out and "there is no model x" in result.out


def test_a_log_alone_is_told(autockpt, log: Path) -> None:
    result = autockpt("diagnose", "run.log")
    said = " ".join(result.out.split())
    assert result.code == 0 and "in the forward pass (train.py:80)" in said and "No model was named" in said
