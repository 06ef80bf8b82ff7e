"""``autockpt verify``: hold a plan against its promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import FAILED, guarded
from autockpt.cli.options import DEVICE, arg, flag, opt, takes_workload, workload_spec


@guarded
@takes_workload
def verify(
    workload: dict[str, Any],
    plan: Path = arg("PLAN|RUN", "The plan file, or the directory of the run that found it.", default=...),
    *,
    device: str | None = DEVICE,
    seed: int | None = opt("--seed N", "For weights and batch. Default: 0.", min=0),
    as_json: bool = flag("--json", "Print the report as JSON."),
) -> None:
    """Check a plan's promises: gradients, peak and step time.

    In a fresh process: gradients equal to plain training's, ops recomputed as planned, peak and step time as promised.
    Options that are not given are those that the plan was made with. Exits with 4 where a promise is not kept.
    """
    from autockpt.history.trialplan import plan_at

    spec = workload_spec(workload, base=plan_at(plan).workload, seed=seed)
    from autockpt.reporting.progress import listener
    from autockpt.reporting.verify_view import print_report
    from autockpt.verification import verify as run_verification

    with listener(screen.progress(), f"verify {spec.model}") as watcher:
        report = run_verification(plan, spec, device=device, listener=watcher)
    screen.show(report, print_report, as_json)
    if not report.passed:
        raise typer.Exit(FAILED)
