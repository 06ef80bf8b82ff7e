from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autockpt.cost import calibrate
from autockpt.cost.calibrate import described
from autockpt.errors import DeviceOutOfMemory
from autockpt.shipped import load_hardware
from tests.cost.test_calibrate import machine


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def measure(device: str | None, *, quick: bool, tell: Any) -> Any:
        asked.append((device, quick))
        tell("something")
        return described(machine())

    monkeypatch.setattr(calibrate, "measure_in_child", measure)
    return asked


def test_the_file_is_written_and_shown(autockpt, measured: list[Any], tmp_path: Path) -> None:
    result = autockpt("calibrate", "--device", "cpu", "--quick", "--hardware-out", "new/mine.yaml")
    assert result.code == 0, result.err
    assert measured == [("cpu", True)]
    hardware = load_hardware(tmp_path / "new" / "mine.yaml")
    assert hardware.name == "mine" and hardware.environment is not None and hardware.measured
    assert "built-in: cpu" in result.out and "matrix rate float32" in result.out and "mine.yaml" in result.err


def test_without_a_name_the_device_gives_one(autockpt, measured: list[Any], tmp_path: Path) -> None:
    result = autockpt("calibrate", "--json")
    assert result.code == 0 and result.json["kind"] == "cpu"
    assert load_hardware(tmp_path / "a-cpu.yaml").description == "A CPU"


def test_nothing_is_overwritten_or_measured_in_vain(autockpt, measured: list[Any], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    result = autockpt("calibrate", "--hardware-out", "mine.yaml")
    assert result.code == 2 and "exists already" in result.err and "--force" in result.err
    assert not measured and (tmp_path / "mine.yaml").read_text() == "precious"
    assert autockpt("calibrate", "--hardware-out", "mine.yaml", "--force").code == 0
    assert load_hardware(tmp_path / "mine.yaml").kind == "cpu"
    (tmp_path / "a-cpu.yaml").write_text("precious")
    assert autockpt("calibrate").code == 2 and (tmp_path / "a-cpu.yaml").read_text() == "precious"


def test_wrong_questions(autockpt, measured: list[Any], tmp_path: Path) -> None:
    result = autockpt("calibrate", "--hardware-out", "mine.json")
    assert result.code == 2 and ".yaml" in result.err
    (tmp_path / "file").write_text("")
    assert autockpt("calibrate", "--hardware-out", "file/mine.yaml").code == 2
    assert not measured


def test_failures_are_explained(autockpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DeviceOutOfMemory("the device is full", remedy="Wait.")

    monkeypatch.setattr(calibrate, "measure_in_child", full)
    result = autockpt("calibrate", "--device", "cpu")
    assert result.code == 4 and "the device is full" in result.err
    monkeypatch.setattr(calibrate, "measure_in_child", lambda *_, **__: described(machine(launch_seconds=1.0)))
    result = autockpt("calibrate", "--device", "cpu")
    assert result.code == 4 and "launch_seconds" in result.err and "contradicts" in result.err
