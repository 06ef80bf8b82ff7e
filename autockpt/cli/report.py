"""``autockpt report``: a run as one page."""

from __future__ import annotations

from pathlib import Path

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import RUNS_FOLDER, arg, opt, run_at


@guarded
def report(
    run: Path = arg("RUN", "A run's directory, or its name in results/.", default=...),
    report_out: Path | None = opt("--report-out FILE", "Write here. Default: report.html in the run."),
    out: Path = RUNS_FOLDER,
) -> None:
    """Write a run as one HTML page: what was found, and why.

    The page needs no network and no other file. A search writes it when it ends; this writes it again, also for a run
    that is still at work.
    """
    from autockpt.analysis.page import write_page

    screen.results().print(str(write_page(run_at(run, out), report_out)), soft_wrap=True)
