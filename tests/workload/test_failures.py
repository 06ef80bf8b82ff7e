"""Failures in other people's code become one line with a place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autockpt.errors import UsageError, WorkloadError
from autockpt.workload.failures import explain, is_out_of_memory, location, step_failed, summary


def caught(code: str, filename: str) -> BaseException:
    try:
        exec(compile(code, filename, "exec"), {"torch": torch})
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_place_and_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.py"
    code = "x = torch.ones(2)\n\ndef f():\n    return x @ torch.ones(3)\nf()\n"
    file.write_text(code)
    monkeypatch.chdir(tmp_path)
    error = explain(caught(code, str(file)), "the step")
    assert isinstance(error, WorkloadError)
    assert error.message.startswith("the step failed at train.py:4: RuntimeError: ")
    assert error.remedy


def test_without_a_place_in_users_code() -> None:
    error = caught("torch.ones(2) @ torch.ones(3)", "<string>")
    assert location(error) is None or "test_failures" in str(location(error))
    assert location(ValueError("never raised")) is None
    assert "a batch of your own" in step_failed(ValueError("never raised"), "the step").remedy
    assert "a batch of your own" not in step_failed(caught("1 / 0", "train.py"), "the step").remedy
    with pytest.raises(TypeError) as raised:
        torch.optim.LBFGS([torch.zeros(1)]).step()  # type: ignore[call-arg]
    assert "calls a closure" in step_failed(raised.value, "the step").remedy


def test_errors_for_people_pass_through() -> None:
    error = UsageError("wrong", remedy="do this")
    assert explain(error, "the step") is error


def test_summaries_fit_a_line() -> None:
    assert summary(ValueError("a\n  b\n\nc")) == "ValueError: a b c"
    assert summary(ValueError()) == "ValueError"
    assert len(summary(ValueError("x" * 10_000))) < 300


def test_out_of_memory_is_recognised() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(caught("torch.empty(1 << 60)", "<string>"))
    assert not is_out_of_memory(ValueError("memory"))
