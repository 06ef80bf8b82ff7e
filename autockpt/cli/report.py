"""``autockpt report``: a run as one page."""

from __future__ import annotations

from pathlib import Path

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import RUNS_FOLDER, arg, opt, run_at


@guarded
def report(
    run: Path = arg("RUN", "A run's directory, or its name in results/.", default=...),
    other: Path | None = arg("OTHER", "A second run, to compare the two."),
    report_out: Path | None = opt(
        "--report-out FILE",
        "Write here. Default: report.html in the run; of two runs, compare-<name>.html in the second.",
    ),
    out: Path = RUNS_FOLDER,
) -> None:
    """Write a run as one HTML page: what was found, and why.

    The page needs no network and no other file. A search writes it when it ends; this writes it again, also for a run
    that is still at work. With two runs: what was asked differently, and what came of it.
    """
    from autockpt.page import write_comparison, write_page

    first = run_at(run, out)
    written = (
        write_page(first, report_out) if other is None else write_comparison(first, run_at(other, out), report_out)
    )
    screen.results().print(str(written), soft_wrap=True)
