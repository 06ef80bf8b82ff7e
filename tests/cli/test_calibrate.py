from pathlib import Path
from typing import Any

import pytest

from autockpt.cost import calibrate
from autockpt.schema.hardware import Hardware
from autockpt.shipped import load_hardware

MACHINE = load_hardware("cpu").model_copy(update={"name": "measured", "description": "A CPU"})


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def measure(device: str | None, *, quick: bool, tell: Any) -> Hardware:
        asked.append((device, quick))
        tell("something")
        return MACHINE

    monkeypatch.setattr(calibrate, "measure_in_child", measure)
    return asked


def test_the_file_is_written_and_shown(autockpt, measured: list[Any], tmp_path: Path) -> None:
    result = autockpt("calibrate", "--device", "cpu", "--quick", "--out", "new")
    assert result.code == 0, result.err
    assert measured == [("cpu", True)]
    hardware = load_hardware(tmp_path / "new" / "a-cpu.yaml")
    assert hardware == MACHINE.model_copy(update={"name": "a-cpu"})
    assert result.out == (tmp_path / "new" / "a-cpu.yaml").read_text() and "a-cpu.yaml" in result.err


def test_an_earlier_file_is_kept(autockpt, measured: list[Any], tmp_path: Path) -> None:
    (tmp_path / "a-cpu.yaml").write_text("precious")
    result = autockpt("calibrate", "--json")
    assert result.code == 0 and result.json["kind"] == "cpu"
    assert load_hardware(tmp_path / "a-cpu.yaml").description == "A CPU"
    assert (tmp_path / "a-cpu.yaml.1").read_text() == "precious"


def test_nothing_is_measured_in_vain(autockpt, measured: list[Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert autockpt("calibrate", "--out", "file").code == 2 and not measured
