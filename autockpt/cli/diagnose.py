"""``autockpt diagnose``: from an out-of-memory failure to a plan, or to what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import arg, flag, named_hardware, opt, takes_workload, workload_spec
from autockpt.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from autockpt.schema import Budget


@guarded
@takes_workload
def diagnose(
    workload: dict[str, Any],
    log: Path = arg("LOG", "The failed run's log: what it wrote to standard error.", ...),
    *,
    budget: str | None = opt("--budget SIZE", "Plan for less than the device has: 22GiB. Default: all of it."),
    hardware: str | None = opt(
        "--hardware NAME",
        "The device: rtx4090, h100, …, or a YAML file. Default: the one nearest to what the log says.",
    ),
    plan_out: Path | None = opt("--plan-out FILE", "Write the plan here; another one there is set aside."),
    as_json: bool = flag("--json", "Print JSON."),
) -> None:
    """Show what filled a device's memory, and find a plan that fits.

    Reads the log of the failed run; options or --job describe its training step. No step is run: bytes come from ghost
    runs (whole steps on tensors without memory), seconds from a roofline. Exits with 3 where no plan fits, after
    listing changes that would.
    """
    from autockpt.analysis.oom_log import read_log

    asked = _budget(budget)
    reading = read_log(log)
    spec = workload_spec(workload) if "model" in workload else None
    if spec is None and plan_out is not None:
        raise UsageError("--plan-out needs a model to plan for", remedy="Add --model, or --job with one.")
    from autockpt.analysis.diagnose import DiagnoseRequest
    from autockpt.analysis.diagnose import diagnose as diagnosed
    from autockpt.cli.diagnose_table import print_diagnosis
    from autockpt.progress import listener

    question = DiagnoseRequest(reading, spec, asked, named_hardware(hardware), plan_out)
    with listener(screen.progress()) as watcher:
        said = diagnosed(question, watcher)
    screen.show(said, print_diagnosis, as_json)
    if said.unprescribed:
        raise typer.Exit(UsageError.exit_code)
    if said.room is not None and not said.choices:
        raise typer.Exit(InfeasibleError.exit_code)


def _budget(text: str | None) -> Budget | None:
    from autockpt.schema import parse_budget

    if text is None:
        return None
    asked = parse_budget(text)
    if asked.is_share:
        raise UsageError(
            f"--budget {text} is a share of a peak, and a failed run is planned for a device",
            remedy="Write a size with its unit, such as 22GiB, or leave it out.",
        )
    return asked if asked.kind == "bytes" else None
