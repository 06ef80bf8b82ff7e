"""``autockpt history``: what a run tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import RunsFolder, run_at
from autockpt.errors import RunDirectoryError, UsageError

if TYPE_CHECKING:
    from autockpt.history.rundir import RunDirectory


@guarded
def history(
    run: Annotated[
        Path | None, typer.Argument(help="A run's directory, or its name in results/. Without: list the runs.")
    ] = None,
    sort: Annotated[
        str, typer.Option("--sort", metavar="[number|time|peak|predicted]", help="Order of the trials.")
    ] = "number",
    best: Annotated[int | None, typer.Option("--best", min=1, metavar="N", help="Only the N fastest that fit.")] = None,
    out: RunsFolder = Path("results"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a run tried, and its Pareto front.

    A letter per unit says what was chosen: . save, R recompute, O offload.
    """
    from autockpt.history.trials import SORT_KEYS
    from autockpt.schema.suggest import closest

    if sort not in SORT_KEYS:
        near = closest(sort, SORT_KEYS)
        raise UsageError(
            f"trials cannot be sorted by {sort!r}",
            remedy=(f"Did you mean {near}? " if near else "") + f"Use {', '.join(SORT_KEYS)}.",
        )
    if run is None:
        _list_runs(out, as_json)
    else:
        _print_run(run_at(run, out), sort, best, as_json)


def _print_run(run: RunDirectory, sort: str, best_count: int | None, as_json: bool) -> None:
    from autockpt.history.trials import best, pareto_front, ranked

    trials = run.trials()
    front = pareto_front(trials)
    shown = best(trials, best_count) if best_count else trials
    shown = ranked(shown, "time" if best_count and sort == "number" else sort)
    if as_json:
        data: dict[str, Any] = {
            "run": str(run.path),
            "question": run.question,
            "trials": [t.model_dump(mode="json") for t in shown],
            "pareto_front": [t.number for t in front],
        }
        screen.print_json(json.dumps(data, indent=2))
        return
    from autockpt.report import print_trials

    console = screen.results()
    console.print(str(run.path), style="bold", soft_wrap=True)
    console.print()
    print_trials(shown, front, console)


def _list_runs(out: Path, as_json: bool) -> None:
    """One line per run in a folder, damaged ones named rather than hidden."""
    from autockpt.history.rundir import RunDirectory
    from autockpt.history.trials import best
    from autockpt.report.progress import describe_numbers

    rows: list[dict[str, Any]] = []
    for path in sorted(p for p in out.glob("*_*_*_*") if p.is_dir()):
        try:
            trials = RunDirectory.open(path).trials()
        except RunDirectoryError as error:
            rows.append({"run": path.name, "damaged": error.message})
            continue
        fastest = next(iter(best(trials, 1)), None)
        counted = sum(t.measured is not None for t in trials)
        rows.append(
            {
                "run": path.name,
                "trials": len(trials),
                "measured": counted,
                "best": describe_numbers(fastest) if fastest else None,
            }
        )
    if as_json:
        screen.print_json(json.dumps(rows, indent=2))
        return
    if not rows:
        raise UsageError(f"there are no runs in {out}", remedy="Name a run's directory, or the folder with --out.")
    console = screen.results()
    for row in rows:
        said = row.get("damaged") or f"{_counted(row)}, best {row['best'] or 'none yet'}"
        console.print(f"{row['run']}  {said}", soft_wrap=True)


def _counted(row: dict[str, Any]) -> str:
    """Trials as a search counts them: those that were measured, beside all that were looked at."""
    measured = f", {row['measured']} measured" if row["measured"] not in (0, row["trials"]) else ""
    return f"{row['trials']} trial{'' if row['trials'] == 1 else 's'}{measured}"
