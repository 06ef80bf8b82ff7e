from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autockpt.cli.calibrate import print_hardware
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
    result = autockpt("calibrate", "--device", "cpu", "--quick", "--out", "new")
    assert result.code == 0, result.err
    assert measured == [("cpu", True)]
    hardware = load_hardware(tmp_path / "new" / "a-cpu.yaml")
    assert hardware.name == "a-cpu" and hardware.environment is not None and hardware.measured
    assert "built-in: cpu" in result.out and "matrix rate float32" in result.out and "a-cpu.yaml" in result.err


def test_an_earlier_file_is_kept(autockpt, measured: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a-cpu.yaml").write_text("precious")
    result = autockpt("calibrate", "--json")
    assert result.code == 0 and result.json["kind"] == "cpu"
    assert load_hardware(tmp_path / "a-cpu.yaml").description == "A CPU"
    assert (tmp_path / "a-cpu.yaml.1").read_text() == "precious"


def test_nothing_is_measured_in_vain(autockpt, measured: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert autockpt("calibrate", "--out", "file").code == 2 and not measured


def test_failures_are_explained(autockpt, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DeviceOutOfMemory("the device is full", remedy="Wait.")

    monkeypatch.setattr(calibrate, "measure_in_child", full)
    result = autockpt("calibrate", "--device", "cpu")
    assert (result.code, result.error) == (4, "memory.device")
    monkeypatch.setattr(calibrate, "measure_in_child", lambda *_, **__: described(machine(launch_seconds=1.0)))
    result = autockpt("calibrate", "--device", "cpu")
    assert (result.code, result.error) == (4, "measurement") and "launch_seconds" in result.err


def test_measured_beside_the_built_in_description() -> None:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        print_hardware(load_hardware("t4"), load_hardware("a100-40"), console)
    text = capture.get()
    line = next(line for line in text.splitlines() if line.startswith("memory bandwidth"))
    assert "built-in: a100-40" in text and "320 GB/s" in line and "1.55 TB/s" in line and "20.6 %" in line
    assert "312 TFLOP/s" in text, "what only one side has is shown"
