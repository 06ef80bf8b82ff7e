"""``autockpt calibrate``: measure this machine and write its hardware description."""

from __future__ import annotations

import re
import time
from pathlib import Path

import yaml

from autockpt.cli.guard import guarded, progress, show
from autockpt.cli.options import flag, opt
from autockpt.errors import UsageError
from autockpt.schema.files import set_aside, unwritable, write_file
from autockpt.schema.hardware import Hardware


@guarded
def calibrate(
    *,
    out: Path = opt("--out -o DIR", "Folder for the description, a YAML file named after the device.", default=Path()),
    device: str | None = opt("--device DEVICE", "cpu, cuda, cuda:1, xpu, … Default: the best there is."),
    quick: bool = flag("--quick", "Fewer repeats."),
    as_json: bool = flag("--json", "Print the description as JSON."),
) -> None:
    """Measure this machine and write its hardware description.

    Measures rates of matrix products by type and size, of attention, memory bandwidth, launch overhead, copies off the
    device and back, memory and context. Fits the efficiencies that explain them together. `--hardware FILE` then takes
    the file in place of a built-in description. Measure while nothing else runs.
    """
    from autockpt.cost.calibrate import measure_in_child

    if why := unwritable(out / "hardware.yaml"):
        raise UsageError(f"{out} cannot be written to: {why}", remedy="Give another --out.")
    console, began = progress(), time.perf_counter()
    with console.status("measuring …") as status:
        measured = measure_in_child(device, quick=quick, tell=lambda what: status.update(f"measuring: {what} …"))
    slug = re.sub(r"[\W_]+", "-", measured.description.lower()).strip("-")
    path = out / f"{slug or 'hardware'}.yaml"
    hardware = measured.model_copy(update={"name": path.stem})
    aside, text = set_aside(path) if path.exists() else None, dump_hardware(hardware)
    write_file(path, text, UsageError)
    show(hardware, lambda _, console: console.print(text, end="", soft_wrap=True), as_json)
    console.print(f"{path}: written, measured in {time.perf_counter() - began:.0f} s")
    if aside is not None:
        console.print(f"The earlier file is kept as {aside}")


def dump_hardware(hardware: Hardware) -> str:
    """A description as the text of a YAML file, without the name (which is the file's) and what was left out."""
    data = hardware.model_dump(mode="json", exclude={"name"}, exclude_none=True)
    kept = {key: value for key, value in data.items() if value is not False and value not in ("", {})}
    return yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, width=120)
