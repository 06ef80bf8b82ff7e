"""``autockpt history``: what runs tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import RUNS_FOLDER, arg, flag, opt, run_at
from autockpt.errors import PlanError, RunDirectoryError, UsageError

if TYPE_CHECKING:
    from autockpt.schema import Trial
    from autockpt.schema.runs import RunDirectory


@guarded
def history(
    run: Path | None = arg("RUN", "A run's directory, or its name in results/. Without: list the runs."),
    trial: int | None = opt("--trial N", "One trial in full: each measurement, its prediction, why.", min=0),
    plan_out: Path | None = opt("--plan-out FILE", "With --trial: write that trial's plan."),
    page: bool = flag("--page", "Write the run as one HTML page, report.html in its directory."),
    out: Path = RUNS_FOLDER,
    as_json: bool = flag("--json", "Print JSON."),
) -> None:
    """Print the trials of a run; without a run, list the runs.

    A letter for each layer stands for its choice; the legend under the table explains those that occur. The page that
    --page writes needs no network and no other file. A search writes it when it ends; this writes it again, also for a
    run that is still at work.
    """
    if plan_out is not None and trial is None:
        raise UsageError("--plan-out writes the plan of one trial", remedy="Add --trial with its number.")
    if page and trial is not None:
        raise UsageError("--page shows the whole run", remedy="Leave --trial out.")
    if run is None:
        if page or trial is not None:
            raise UsageError("no run was named", remedy="Name a run's directory, or leave the other options out.")
        _list_runs(out, as_json)
        return
    opened = run_at(run, out)
    if page:
        _write_page(opened, as_json)
    elif trial is not None:
        _print_trial(opened, trial, plan_out, as_json)
    else:
        _print_run(opened, as_json)


def _write_page(run: RunDirectory, as_json: bool) -> None:
    from autockpt.analysis.page import write_page

    path = str(write_page(run))
    if as_json:
        screen.print_json(json.dumps({"page": path}))
    else:
        screen.results().print(path, soft_wrap=True)


def _print_run(run: RunDirectory, as_json: bool) -> None:
    from autockpt.schema.runs import pareto_front

    trials = run.trials()
    front = pareto_front(trials)
    if as_json:
        data: dict[str, Any] = {
            "run": str(run.path),
            "question": run.question,
            "trials": [t.model_dump(mode="json") for t in trials],
            "pareto_front": [t.number for t in front],
            "sets": _sets(run),
        }
        screen.print_json(json.dumps(data, indent=2))
        return
    from autockpt.cli.history_table import print_table, when
    from autockpt.schema.step_note import step_note

    console, note = screen.results(), step_note(run.environment(), None)
    begun, last = run.dates()
    console.print(str(run.path), style="bold", soft_wrap=True)
    console.print(f"begun {when(begun)}, last trial {when(last)}", style="dim")
    if refused := run.refusal():
        console.print(refused, markup=False, soft_wrap=True)
    console.print()
    if not trials:
        console.print("nothing was tried yet")
        return
    print_table(trials, front, console, note)
    if sets := _sets(run):
        console.print("\nThe answer's sets of choices, by the size of the batch:", style="bold")
        console.print("\n".join(f"  {line}" for line in sets), markup=False, soft_wrap=True)


def _sets(run: RunDirectory) -> list[str]:
    """A line for each set of the run's answer; none where that is no plan, one for all batches, or damaged."""
    from autockpt.schema.plan import set_lines

    try:
        plan = run.plan()
    except PlanError:
        return []
    return [] if plan is None else set_lines(plan)


def _print_trial(run: RunDirectory, number: int, plan_out: Path | None, as_json: bool) -> None:
    from autockpt.schema.runs import BY_LENGTH, PLAN, plan_of_trial, trial_of

    if plan_out is not None and plan_out.resolve() in (run.path.resolve() / name for name in (PLAN, BY_LENGTH)):
        raise UsageError(f"{plan_out} is where the run keeps its own answer", remedy="Give another --plan-out.")
    trial = trial_of(run, number)
    readings = [reading for reading in run.readings() if reading.number == number]
    set_aside = plan_of_trial(run, trial).save(plan_out, existing="set_aside") if plan_out is not None else None
    if as_json:
        data = {"trial": trial.model_dump(mode="json"), "readings": [r.model_dump(mode="json") for r in readings]}
        screen.print_json(json.dumps(data, indent=2))
        return
    from autockpt.cli.history_table import print_trial

    console = screen.results()
    print_trial(trial, readings, console)
    if plan_out is not None:
        kept = f"; what stood there is kept as {set_aside}" if set_aside is not None else ""
        console.print()
        console.print(f"Its plan is written to {plan_out}{kept}.", soft_wrap=True)


def _in_short(run: RunDirectory) -> tuple[dict[str, Any], Trial | None]:
    """One run in a few facts, and its fastest trial that fits."""
    from autockpt.cli.history_table import when
    from autockpt.schema.runs import best

    trials = run.trials()
    return {
        "run": run.path.name,
        "date": when(run.dates()[1]),
        "trials": len(trials),
        "measured": sum(t.measured is not None for t in trials),
        "infeasible": run.refusal().partition("\n")[0] or None,
    }, next(iter(best(trials, 1)), None)


def _list_runs(out: Path, as_json: bool) -> None:
    """A row per run in a folder, oldest first; damaged ones named rather than hidden."""
    from autockpt.schema.runs import RunDirectory, row

    runs: list[tuple[dict[str, Any], Trial | None]] = []
    for path in sorted(p for p in out.glob("*_*_*_*") if p.is_dir()):
        try:
            runs.append(_in_short(RunDirectory.open(path)))
        except RunDirectoryError as error:
            runs.append(({"run": path.name, "damaged": error.message}, None))
    runs.sort(key=lambda run: run[0].get("date", ""))
    if as_json:
        screen.print_json(
            json.dumps([facts | {"best": row(best) if best is not None else None} for facts, best in runs], indent=2)
        )
        return
    if not runs:
        raise UsageError(f"there are no runs in {out}", remedy="Name a run's directory, or the folder with --out.")
    from autockpt.cli.history_table import print_runs

    print_runs(runs, screen.results())
