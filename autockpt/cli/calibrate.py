"""``autockpt calibrate``: measure this machine and write its hardware description."""

from __future__ import annotations

import re
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import flag, opt
from autockpt.errors import UsageError
from autockpt.schema import Hardware, format_bytes
from autockpt.schema.files import set_aside, unwritable, write_file
from autockpt.schema.hardware import dump_hardware
from autockpt.schema.sizes import scaled
from autockpt.schema.words import seconds, share
from autockpt.shipped import described_like
from autockpt.terminal import plain_table

_FIGURES = (
    ("memory bandwidth", "bandwidth", "B/s"),
    ("launch, per op", "launch_seconds", "s"),
    ("off the device", "link_out", "B/s"),
    ("back onto it", "link_in", "B/s"),
    ("memory", "memory_bytes", "B"),
    ("context", "context_bytes", "B"),
)


@guarded
def calibrate(
    *,
    out: Path = opt("--out -o DIR", "Folder for the description, a YAML file named after the device.", default=Path()),
    device: str | None = opt("--device DEVICE", "cpu, cuda, cuda:1, xpu, … Default: the best there is."),
    quick: bool = flag("--quick", "Fewer repeats."),
    as_json: bool = flag("--json", "Print the description as JSON."),
) -> None:
    """Measure this machine and write its hardware description.

    Measures rates of matrix products by type and size, of attention and single kernels, memory bandwidth, launch
    overhead, copies off the device and back, memory and context. Fits the efficiencies that explain them together.
    `--hardware FILE` then takes the file in place of a built-in description. Measure while nothing else runs.
    """
    from autockpt.cost.calibrate import measure_in_child

    if why := unwritable(out / "hardware.yaml"):
        raise UsageError(f"{out} cannot be written to: {why}", remedy="Give another --out.")
    console, began = screen.progress(), time.perf_counter()
    with console.status("measuring …") as status:
        measured = measure_in_child(device, quick=quick, tell=lambda what: status.update(f"measuring: {what} …"))
    slug = re.sub(r"[\W_]+", "-", measured.description.lower()).strip("-")
    path = out / f"{slug or 'hardware'}.yaml"
    hardware = measured.model_copy(update={"name": path.stem})
    aside = set_aside(path) if path.exists() else None
    write_file(path, dump_hardware(hardware), UsageError)
    if as_json:
        screen.print_json(hardware.model_dump_json(indent=2))
    else:
        like = described_like(hardware.description, hardware.kind, hardware.memory_bytes)
        print_hardware(hardware, like, screen.results())
        screen.results().print(f"more figures are in {path}", style="dim")
    console.print(f"{path}: written, measured in {time.perf_counter() - began:.0f} s")
    if aside is not None:
        console.print(f"The earlier file is kept as {aside}")


def print_hardware(measured: Hardware, like: Hardware | None, console: Console) -> None:
    """Print what was measured and, where the same card is described, its built-in figures and the ratio."""
    console.print(Text(f"{measured.description or measured.name} ({measured.kind})", style="bold"))
    table = plain_table("figure", ">measured", *([] if like is None else [f">built-in: {like.name}", ">ratio"]))
    known = _figures(like) if like is not None else {}
    for figure, value in _figures(measured).items():
        title, unit = figure
        theirs = known.get(figure)
        if value or theirs:
            beside = [_written(theirs, unit), share(value / theirs) if value and theirs else ""]
            table.add_row(title, _written(value, unit), *([] if like is None else beside))
    console.print(table)


def _figures(of: Hardware) -> dict[tuple[str, str], float | None]:
    """Figures that decide most, by their name and unit."""
    found: dict[tuple[str, str], float | None] = {
        (f"matrix rate {dtype}", "FLOP/s"): of.matrix_flops.get(dtype) for dtype in ("bfloat16", "float16", "float32")
    }
    found |= {(title, unit): getattr(of, name) for title, name, unit in _FIGURES}
    shares = ("matrix", "attention", "bandwidth")
    return found | {(f"share: {name}", "share"): getattr(of.efficiency, name) for name in shares}


def _written(value: float | None, unit: str) -> str:
    if value is None:
        return "—"
    if unit == "share":
        return share(value)
    if unit == "s":
        return seconds(value)
    if unit == "B":
        return format_bytes(value)
    return scaled(value, 1000, tuple(f"{prefix}{unit}" for prefix in ("", "k", "M", "G", "T", "P")))
