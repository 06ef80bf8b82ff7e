"""``autockpt history``: what runs tried."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import RUNS_FOLDER, arg, flag, opt, run_at
from autockpt.errors import PlanError, RunDirectoryError, UsageError

if TYPE_CHECKING:
    from autockpt.history.rundir import RunDirectory
    from autockpt.schema import Trial


@guarded
def history(
    run: Path | None = arg("RUN", "A run's directory, or its name in results/. Without: list the runs."),
    sort: str = opt("--sort [number|time|peak|predicted]", "Order of the trials.", default="number"),
    best: int | None = opt("--best N", "Only the N fastest that fit.", min=1),
    trial: int | None = opt("--trial N", "One trial in full: each measurement, its prediction, why.", min=0),
    plan_out: Path | None = opt("--plan-out FILE", "With --trial: write that trial's plan."),
    compare: Path | None = opt("--compare RUN", "A second run, to compare with the first."),
    out: Path = RUNS_FOLDER,
    as_csv: bool = flag("--csv", "Print the trials as CSV; bytes and seconds."),
    as_json: bool = flag("--json", "Print JSON."),
) -> None:
    """Print what a run tried; without a run, what runs there are.

    A letter for each layer says what was chosen; the legend under the table names those that occur.
    """
    from autockpt.history.trials import SORT_KEYS
    from autockpt.schema.suggest import did_you_mean

    if sort not in SORT_KEYS:
        remedy = f"{did_you_mean(sort, SORT_KEYS)}Use {', '.join(SORT_KEYS)}."
        raise UsageError(f"trials cannot be sorted by {sort!r}", remedy=remedy)
    if plan_out is not None and trial is None:
        raise UsageError("--plan-out writes the plan of one trial", remedy="Add --trial with its number.")
    _one_of_these({"--trial": trial is not None, "--compare": compare is not None, "--best": best is not None})
    _one_of_these({"--trial": trial is not None, "--compare": compare is not None, "--csv": as_csv})
    _one_of_these({"--csv": as_csv, "--json": as_json})
    if run is None:
        if trial is not None or compare is not None or best is not None or as_csv:
            raise UsageError("no run was named", remedy="Name a run's directory, or leave the other options out.")
        _list_runs(out, as_json)
        return
    opened = run_at(run, out)
    if trial is not None:
        _print_trial(opened, trial, plan_out, as_json)
    elif compare is not None:
        _compare(opened, run_at(compare, out), as_json)
    else:
        _print_run(opened, sort, best, as_csv, as_json)


def _one_of_these(given: Mapping[str, bool]) -> None:
    asked = [option for option, is_given in given.items() if is_given]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)} do not go together", remedy="Leave one of them out.")


def _print_run(run: RunDirectory, sort: str, best_count: int | None, as_csv: bool, as_json: bool) -> None:
    from autockpt.history.trials import best, pareto_front, ranked

    trials = run.trials()
    front = pareto_front(trials)
    shown = best(trials, best_count) if best_count else trials
    shown = ranked(shown, "time" if best_count and sort == "number" else sort)
    if as_csv:
        screen.print_json(_csv(shown))
        return
    if as_json:
        data: dict[str, Any] = {
            "run": str(run.path),
            "question": run.question,
            "trials": [t.model_dump(mode="json") for t in shown],
            "pareto_front": [t.number for t in front],
            "sets": _sets(run),
        }
        screen.print_json(json.dumps(data, indent=2))
        return
    from autockpt.reporting.trials_view import print_table, print_trials, when
    from autockpt.schema.step_note import step_note

    console, note = screen.results(), step_note(run.environment(), None)
    begun, last = run.dates()
    console.print(str(run.path), style="bold", soft_wrap=True)
    console.print(f"begun {when(begun)}, last trial {when(last)}", style="dim")
    if refused := run.refusal():
        console.print(refused, markup=False, soft_wrap=True)
    console.print()
    if best_count is None:
        print_trials(shown, front, console, note)
        if sets := _sets(run):
            console.print("\nThe answer's sets of choices, by the size of the batch:", style="bold")
            console.print("\n".join(f"  {line}" for line in sets), markup=False, soft_wrap=True)
        return
    print_table(shown, front, console, note)
    if len(shown) < best_count:
        console.print(f"No more than these were tried and fit: {len(shown)} of {best_count}.")


def _sets(run: RunDirectory) -> list[str]:
    """A line for each set of the run's answer; none where that is no plan, one for all batches, or damaged."""
    from autockpt.schema.planview import set_lines

    try:
        plan = run.plan()
    except PlanError:
        return []
    return [] if plan is None else set_lines(plan)


def _csv(trials: Sequence[Trial]) -> str:
    """The trials as a table for other programs; choices as they are written in plans, one line of JSON."""
    from autockpt.history.openrun import row
    from autockpt.schema import dump_choices
    from autockpt.schema.names import fold

    rows = [row(t) | {"choices": json.dumps(dump_choices(fold(t.choices)))} for t in trials]
    text = io.StringIO()
    table = csv.DictWriter(text, rows[0] if rows else ("number",), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().rstrip("\n")


def _print_trial(run: RunDirectory, number: int, plan_out: Path | None, as_json: bool) -> None:
    from autockpt.history.rundir import BY_LENGTH, PLAN
    from autockpt.history.trialplan import plan_of_trial, trial_of

    if plan_out is not None and plan_out.resolve() in (run.path.resolve() / name for name in (PLAN, BY_LENGTH)):
        raise UsageError(f"{plan_out} is where the run keeps its own answer", remedy="Give another --plan-out.")
    trial = trial_of(run, number)
    readings = [reading for reading in run.readings() if reading.number == number]
    set_aside = plan_of_trial(run, trial).save(plan_out, existing="set_aside") if plan_out is not None else None
    if as_json:
        data = {"trial": trial.model_dump(mode="json"), "readings": [r.model_dump(mode="json") for r in readings]}
        screen.print_json(json.dumps(data, indent=2))
        return
    from autockpt.reporting.trials_view import print_trial

    console = screen.results()
    print_trial(trial, readings, console)
    if plan_out is not None:
        kept = f"; what stood there is kept as {set_aside}" if set_aside is not None else ""
        console.print()
        console.print(f"Its plan is written to {plan_out}{kept}.", soft_wrap=True)


def _compare(first: RunDirectory, second: RunDirectory, as_json: bool) -> None:
    """Two runs compared."""
    from autockpt.history.comparison import differences, in_both

    asked = list(differences(first.question, second.question))
    both = in_both(first.trials(), second.trials())
    runs = [_in_short(run) for run in (first, second)]
    if as_json:
        data = {
            "runs": [_with_best(*run) for run in runs],
            "asked_differently": [dict(zip(("what", "first", "second"), row, strict=True)) for row in asked],
            "plans_of_both": [[one.number, other.number] for one, other in both],
        }
        screen.print_json(json.dumps(data, indent=2))
        return
    from autockpt.reporting.progress import describe_numbers
    from autockpt.reporting.trials_view import print_comparison

    rows = [facts | {"best": fastest and describe_numbers(fastest)} for facts, fastest in runs]
    told = [name for name in rows[0] if name != "infeasible" or any(row[name] for row in rows)]
    found = [(name, *(str(row[name]) if row[name] is not None else "—" for row in rows)) for name in told]
    print_comparison(("first", "second"), found, asked, both, screen.results())  # type: ignore[arg-type]


def _in_short(run: RunDirectory) -> tuple[dict[str, Any], Trial | None]:
    """One run in a few facts, and its fastest trial that fits."""
    from autockpt.history.trials import best
    from autockpt.reporting.trials_view import when

    trials = run.trials()
    fastest = next(iter(best(trials, 1)), None)
    return {
        "run": run.path.name,
        "date": when(run.dates()[1]),
        "trials": len(trials),
        "measured": sum(t.measured is not None for t in trials),
        "infeasible": run.refusal().partition("\n")[0] or None,
    }, fastest


def _with_best(facts: dict[str, Any], fastest: Trial | None) -> dict[str, Any]:
    """The same for other programs, with that trial's numbers as in ``--csv``."""
    from autockpt.history.openrun import row

    return facts | {"best": row(fastest) if fastest is not None else None}


def _list_runs(out: Path, as_json: bool) -> None:
    """A row per run in a folder, oldest first; damaged ones named rather than hidden."""
    from autockpt.history.rundir import RunDirectory

    runs: list[tuple[dict[str, Any], Trial | None]] = []
    for path in sorted(p for p in out.glob("*_*_*_*") if p.is_dir()):
        try:
            runs.append(_in_short(RunDirectory.open(path)))
        except RunDirectoryError as error:
            runs.append(({"run": path.name, "damaged": error.message}, None))
    runs.sort(key=lambda run: run[0].get("date", ""))
    if as_json:
        screen.print_json(json.dumps([_with_best(*run) for run in runs], indent=2))
        return
    if not runs:
        raise UsageError(f"there are no runs in {out}", remedy="Name a run's directory, or the folder with --out.")
    from autockpt.reporting.trials_view import print_runs

    print_runs(runs, screen.results())
