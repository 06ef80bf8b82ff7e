from __future__ import annotations

from rich.console import Console

from autockpt.cli.calibrate_table import hardware_rows, print_hardware
from autockpt.shipped import load_hardware


def drawn(like: str | None) -> str:
    console = Console(width=100, color_system=None, record=True, file=None, quiet=False)
    with console.capture() as capture:
        print_hardware(load_hardware("h200"), load_hardware(like) if like else None, console)
    return capture.get()


def test_measured_beside_the_built_in_description() -> None:
    text = drawn("h100")
    assert "built-in: h100" in text and "989 TFLOP/s" in text
    line = next(line for line in text.splitlines() if line.startswith("memory bandwidth"))
    assert "4.8 TB/s" in line and "3.35 TB/s" in line and "143.3 %" in line


def test_what_only_one_side_has_is_shown() -> None:
    rows = {row[0]: row for row in hardware_rows(load_hardware("t4"), load_hardware("a100-40"))}
    assert rows["matrix rate bfloat16"][1:3] == (None, 312e12)
