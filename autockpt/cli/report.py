"""``autockpt report``: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import RunsFolder, run_at


@guarded
def report(
    run: Annotated[Path, typer.Argument(help="A run's directory, or its name in results/.")],
    report_out: Annotated[
        Path | None, typer.Option("--report-out", metavar="FILE", help="Write here. Default: report.html in the run.")
    ] = None,
    out: RunsFolder = Path("results"),
) -> None:
    """Write a run as one HTML page: what was found, why, and what other budgets would buy.

    The page needs no network and no other file. A search writes it when it ends; this writes it again, also for a run
    that is still at work.
    """
    from autockpt.page import write_page

    print_path(write_page(run_at(run, out), report_out))


def print_path(path: Path) -> None:
    """Say where the page lies."""
    screen.results().print(str(path), soft_wrap=True)
