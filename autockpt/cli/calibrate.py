"""``autockpt calibrate``: the machine at hand as a hardware description."""

from __future__ import annotations

import re
import time
from pathlib import Path

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import flag, opt
from autockpt.errors import UsageError


@guarded
def calibrate(
    *,
    out: Path | None = opt("--hardware-out FILE", "File to write. Default: the device's name, here."),
    device: str | None = opt("--device DEVICE", "cpu, cuda, cuda:1, xpu, … Default: the best there is."),
    quick: bool = flag("--quick", "Fewer repeats."),
    force: bool = flag("--force", "Replace a file that exists."),
    as_json: bool = flag("--json", "Print the description as JSON."),
) -> None:
    """Measure this machine and write its hardware description.

    Rates of matrix products by type and size, of attention and single kernels, memory bandwidth, launch overhead,
    copies off the device and back, memory and context; then the efficiencies that explain them together. Simulated
    planning takes the file in place of a built-in description. Measure while nothing else runs.
    """
    if out is not None:
        _may_write(out, force)
    from autockpt.cost.calibrate import measure_in_child

    console, began = screen.progress(), time.perf_counter()
    with console.status("measuring …") as status:
        measured = measure_in_child(device, quick=quick, tell=lambda what: status.update(f"measuring: {what} …"))
    slug = re.sub(r"[\W_]+", "-", measured.description.lower()).strip("-")
    path = out if out is not None else Path(f"{slug or 'hardware'}.yaml")
    hardware = measured.model_copy(update={"name": path.stem})
    if out is None:
        _may_write(path, force)
    from autockpt.cli.calibrate_table import print_hardware
    from autockpt.schema.files import write_file
    from autockpt.schema.hardware import dump_hardware
    from autockpt.shipped import described_like

    write_file(path, dump_hardware(hardware), UsageError)
    if as_json:
        screen.print_json(hardware.model_dump_json(indent=2))
    else:
        like = described_like(hardware.description, hardware.kind, hardware.memory_bytes)
        print_hardware(hardware, like, screen.results(), path=str(path))
    console.print(f"{path}: written, measured in {time.perf_counter() - began:.0f} s")


def _may_write(path: Path, force: bool) -> None:
    from autockpt.schema.files import unwritable

    if path.suffix not in (".yaml", ".yml"):
        raise UsageError(f"{path} is no name for a hardware description", remedy="End it in .yaml.")
    if path.exists() and not force:
        raise UsageError(f"{path} exists already", remedy="Give another --hardware-out, or replace it with --force.")
    if why := unwritable(path):
        raise UsageError(f"{path} cannot be written: {why}", remedy="Give a path you can write to.")
