"""Trials in other tools' logs: what is written by which name, and that a log never ends a search."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from autockpt.errors import UsageError
from autockpt.reporting.loggers import LoggingListener, logging_to, run_name, serve
from autockpt.schema import Measurement, Prediction, Silence, Trial


def trial(number: int, seconds: float | None) -> Trial:
    measured = None if seconds is None else Measurement(peak_bytes=3 << 20, step_seconds=seconds)
    state = "measured" if seconds else "simulated"
    return Trial(
        number=number, plan_hash="h", name="t", encoding="knobs", state=state, choices={}, feasible=True,
        measured=measured, predicted=Prediction(peak_bytes=2 << 20, step_seconds=0.5),
    )  # fmt: skip


class Notes(Silence):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


class Memory:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.written, self.closed = fails, [], False

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if self.fails:
            raise OSError("disk full")
        self.written.append((step, numbers))

    def close(self) -> None:
        self.closed = True


def test_measured_and_simulated_numbers_have_names_of_their_own() -> None:
    sink = Memory()
    listener = LoggingListener(Silence(), {"tensorboard": sink})
    listener.trial(trial(0, None), None)
    listener.trial(trial(1, 0.25), trial(1, 0.25))
    (first, plain), (second, best) = sink.written
    assert (first, second) == (0, 1)
    assert plain == {"simulated/peak MiB": 2, "simulated/step seconds": 0.5, "trial/fits": 1.0}
    assert best["measured/step seconds"] == 0.25 and best["measured/best peak MiB"] == 3


def test_a_log_that_fails_is_said_once_and_left_alone() -> None:
    heard, good = Notes(), Memory()
    listener = LoggingListener(heard, {"wandb": Memory(fails=True), "tensorboard": good})
    for number in range(3):
        listener.trial(trial(number, 1.0), None)
    listener.close()
    assert heard.said == ["wandb is not written to any more: OSError: disk full"]
    assert len(good.written) == 3 and good.closed


def test_what_is_missing_or_unknown_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for kind, said in (("wandb", "needs the package wandb"), ("mlflow", "is not known")):
        with pytest.raises(UsageError, match=said), logging_to([kind], Silence(), tmp_path, "n", {}):
            raise AssertionError
    with logging_to([], inner := Silence(), tmp_path, "n", {}) as listener:
        assert listener is inner


def test_a_client_that_cannot_begin_says_why() -> None:
    said: list[str] = []
    serve(iter(['["tensorboard", "/dev/null/no", "n", {}]']), said.append)
    assert len(said) == 1 and said[0].split(":")[0].endswith("Error")


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    events: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    with logging_to(["tensorboard"], Silence(), tmp_path, "run", {}) as listener:  # in a process of its own
        listener.trial(trial(0, 0.25), None)
    read: Any = events.EventAccumulator(str(tmp_path / "tensorboard" / "run"))
    read.Reload()
    assert "measured/step seconds" in read.Tags()["tensors"]


def test_a_run_is_named_by_its_question() -> None:
    assert run_name("/models/my llama", "24GB").startswith("my-llama-24GB-20")
    assert run_name("/models/my-llama/config.json", "60%act").startswith("my-llama-60%act-20")
