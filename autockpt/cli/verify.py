"""``autockpt verify``: hold a plan against its promises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import FAILED, guarded
from autockpt.cli.options import DeviceName, takes_workload, workload_spec


@guarded
@takes_workload
def verify(
    plan: Annotated[Path, typer.Argument(help="The plan file.")],
    workload: dict[str, Any],
    *,
    device: DeviceName = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, metavar="N", help="For weights and batch. Default: 0.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Prove that a plan keeps its promises.

    In a fresh process: gradients equal to plain training's, ops recomputed as planned, peak and step time as promised.
    Options that are not given are those that the plan was made with. Exits with 4 where a promise is not kept.
    """
    from autockpt.schema import Plan

    loaded = Plan.load(plan)
    spec = workload_spec(workload, base=loaded.workload, seed=seed)
    from autockpt.report import listener, print_report
    from autockpt.verification import verify as run_verification

    with listener(screen.progress()) as watcher:
        report = run_verification(loaded, spec, device=device, listener=watcher)
    screen.show(report, print_report, as_json)
    if not report.passed:
        raise typer.Exit(FAILED)
