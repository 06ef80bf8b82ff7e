"""``autockpt history``: what runs tried: all runs, the trials of one, one trial in full."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autockpt.cli.guard import guarded, results, show
from autockpt.cli.options import arg, flag, opt
from autockpt.errors import PlanError, RunDirectoryError, UsageError
from autockpt.progress import FITS, STATES
from autockpt.schema import Prediction, Trial, format_binary, format_bytes, words
from autockpt.schema.base import Data
from autockpt.schema.baselines import legend_of_names
from autockpt.schema.names import fold
from autockpt.schema.plan import set_lines
from autockpt.schema.run_directory import RunDirectory, pareto_front, plan_of_trial, trial_of
from autockpt.schema.words import step_note
from autockpt.terminal import plain_table, print_legend, simulated

RESULTS = Path("results")
UNJUDGED = "not known: the budget was not known in bytes yet"


@guarded
def history(
    place: Path = arg("RUN|FOLDER", "A run's directory, its name in results/, or a folder of runs.", default=RESULTS),
    trial: int | None = opt(
        "--trial N", "One trial of a run in full: measurements, predictions, why it failed.", min=0
    ),
    plan_out: Path | None = opt("--plan-out FILE", "With --trial: write that trial's plan."),
    page: bool = flag("--page", "Write one HTML page: report.html of a run, index.html of a folder."),
    as_json: bool = flag("--json", "Print JSON."),
) -> None:
    """Print the trials of a run, or one table of all runs below a folder.

    A letter for each layer stands for its choice; the legend under the table explains those that occur. The page that
    --page writes needs no network and no other file. A search writes its page when it ends; --page writes it again,
    also for a search that is still running. The page of a folder links to those of its runs.
    """
    if plan_out is not None and trial is None:
        raise UsageError("--plan-out writes the plan of one trial", remedy="Add --trial with its number.")
    if page and trial is not None:
        raise UsageError("--page shows the whole run", remedy="Leave --trial out.")
    if not place.exists() and len(place.parts) == 1 and (RESULTS / place).exists():
        place = RESULTS / place
    below = list(RunDirectory.below(place))
    if not below or below == [place]:  # a run, or nothing of the kind: then it says so
        run = RunDirectory.open(place)
        if page:
            from autockpt.analysis.page import write_page

            show({"page": write_page(run)}, _print_page, as_json)
        elif trial is not None:
            _show_trial(run, trial, plan_out, as_json)
        else:
            show(_run_data(run), partial(_print_run, run), as_json)
        return
    if trial is not None:
        raise UsageError(f"{place} is a folder of runs", remedy="Name the run that --trial is of.")
    runs = sorted(map(summary_of, below), key=lambda run: run.date)
    if page:
        from autockpt.analysis.page import write_index

        show({"page": write_index(place, runs)}, _print_page, as_json)
    else:
        show(runs, partial(_print_runs, place), as_json)


class RunSummary(Data):
    """One run: its question in a few words, and its answer. ``infeasible`` and ``damaged`` say why it has none."""

    path: Path
    date: float = 0.0
    model: str = ""
    on: str = ""
    budget: str = ""
    job: str = ""
    trials: int = 0
    answer: Trial | None = None
    infeasible: str = ""
    damaged: str = ""

    @property
    def state(self) -> str:
        """Why there is no answer, in two words."""
        return "damaged" if self.damaged else "nothing fits" if self.infeasible else "none yet"


def summary_of(path: Path) -> RunSummary:
    """The run in a directory; a damaged one says what is wrong with it."""
    try:
        run = RunDirectory.open(path)
        environment, trials, refusal = run.environment(), run.trials(), run.refusal()
        return RunSummary(
            path=path,
            date=run.dates()[1],
            model=run.model,
            on=environment.device.name if environment is not None else "",
            budget=str(run.question.get("budget") or ""),
            job=run.job,
            trials=len(trials),
            answer=None if refusal else run.answer(trials),
            infeasible=refusal.partition("\n")[0],
        )
    except RunDirectoryError as error:
        return RunSummary(path=path, damaged=error.message)


def _print_page(written: dict[str, Path], console: Console) -> None:
    console.print(str(written["page"]), soft_wrap=True)


def _run_data(run: RunDirectory) -> dict[str, Any]:
    """What a run was asked and tried, and a line for each set of its answer where that has several."""
    trials, sets = run.trials(), list[str]()
    with suppress(PlanError):  # damaged
        if (plan := run.plan()) is not None:
            sets = set_lines(plan)
    front = [trial.number for trial in pareto_front(trials)]
    return {"run": run.path, "question": run.question, "trials": trials, "pareto_front": front, "sets": sets}


def _print_run(run: RunDirectory, found: dict[str, Any], console: Console) -> None:
    begun, last = run.dates()
    console.print(str(run.path), style="bold", soft_wrap=True)
    console.print(f"begun {words.when(begun)}, last trial {words.when(last)}", style="dim")
    if refused := run.refusal():
        console.print(refused, soft_wrap=True)
    console.print()
    if not found["trials"]:
        console.print("nothing was tried yet")
        return
    print_table(found["trials"], pareto_front(found["trials"]), console, step_note(run.environment(), None))
    if found["sets"]:
        console.print("\nThe answer's sets of choices, by the size of the batch:", style="bold")
        console.print("\n".join(f"  {line}" for line in found["sets"]), soft_wrap=True)


def _show_trial(run: RunDirectory, number: int, plan_out: Path | None, as_json: bool) -> None:
    if plan_out is not None and plan_out.resolve() == run.plan_path.resolve():
        raise UsageError(f"{plan_out} is where the run keeps its own answer", remedy="Give another --plan-out.")
    trial = trial_of(run, number)
    set_aside = plan_of_trial(run, trial).save(plan_out) if plan_out is not None else None
    show(trial, print_trial, as_json)
    if plan_out is not None and not as_json:
        kept = f"; the earlier file is kept as {set_aside}" if set_aside is not None else ""
        results().print(f"\nIts plan is written to {plan_out}{kept}.", soft_wrap=True)


def _print_runs(folder: Path, runs: Sequence[RunSummary], console: Console) -> None:
    """Print runs in the order given, each with its answer, then in words why a run has none."""
    table = plain_table("run", "batch", ">step", ">peak", "<plan")
    for run in runs:
        if not run.damaged:
            score = run.answer.score if run.answer is not None else None
            step, _, _ = words.step_of(score).partition(" ±")  # a narrow terminal has no room for the noise
            mark = "~" * isinstance(score, Prediction)
            peak = f"{mark}{format_binary(score.peak_bytes)}" if score is not None else "—"
            plan = words.strip(run.answer.choices, 16) if run.answer is not None else run.state
            table.add_row(str(run.path.relative_to(folder)), run.job, step, peak, plan)
    console.print(table)
    if any(run.answer is not None and run.answer.state == "simulated" for run in runs):
        console.print(simulated())
    for run in runs:
        if why := run.damaged or run.infeasible:
            console.print(f"{run.path.name}: {why}", soft_wrap=True)


def print_table(trials: Sequence[Trial], front: Sequence[Trial], console: Console, step_note: str = "") -> None:
    """Print trials in the order given, and what the letters mean."""
    console.print(_trials_table(trials, {t.number for t in front}, console.width))
    console.print()
    letters = ", ".join(f"{letter} {kind}" for letter, kind in words.letters(trial.choices for trial in trials))
    found = f"A letter for each layer, first to last: {letters}; a small letter: for its attention or MLP alone"
    console.print(Text(found, style="dim"))
    print_legend((choice for trial in trials for choice in trial.choices.values()), console)
    for line in legend_of_names(trial.name for trial in trials):
        console.print(Padding.indent(Text(line, style="dim"), 2))
    if front:
        console.print(Text("* on the Pareto front: no other is both faster and leaner", style="dim"))
    if any(t.state == "simulated" for t in trials):
        console.print(simulated(step_note))
    if any(t.measured is not None and t.measured.noise >= words.USELESS_NOISE for t in trials):
        console.print(Text(words.NOISE_UNKNOWN, style="dim"))
    if any(t.feasible is None for t in trials):
        console.print(Text(f"? {UNJUDGED}", style="dim"))
    console.print()


def _trials_table(trials: Sequence[Trial], front: set[int], width: int) -> Table:
    """Number, origin, peak, step time, verdict, hash and the choices in one line, of one length for all."""
    units = list(dict.fromkeys(name for trial in trials for name in trial.choices))
    table = plain_table("", ">#", "origin", ">peak", ">step", "fits", "plan", "<choices")
    for trial in trials:
        known, mark = trial.measured or trial.predicted, "" if trial.measured is not None else "~"
        table.add_row(
            "*" if trial.number in front else "",
            str(trial.number),
            trial.encoding if trial.encoding != "baseline" else trial.name,
            f"{mark}{format_binary(known.peak_bytes)}" if known is not None else "—",
            words.step_of(known),
            _fits(trial),
            trial.plan_hash[:8],
            words.strip(trial.choices, max(12, width - 66), units),
        )
    return table


def _fits(trial: Trial) -> Text:
    if trial.state in ("out_of_memory", "failed"):
        return Text("OOM" if trial.state == "out_of_memory" else "failed", style="red")
    word, style = {None: ("?", "dim"), True: ("yes", "green"), False: ("no", "red")}[trial.feasible]
    return Text(word, style=style)


def print_trial(trial: Trial, console: Console) -> None:
    """One trial in full."""
    console.print(Text(f"Trial {trial.number}: {trial.name}", style="bold"))
    verdict = STATES[trial.state] or FITS[trial.feasible] or UNJUDGED
    console.print(f"{verdict}{f': {trial.message}' if trial.message else ''}", soft_wrap=True)
    facts = [f"proposed as {trial.encoding}", f"plan {trial.plan_hash}"]
    if trial.elapsed_seconds:
        facts.append(f"ended {words.seconds(trial.elapsed_seconds)} after the search began")
    console.print(Text(", ".join(facts), style="dim"), soft_wrap=True)
    console.print()
    console.print(_beside(trial))
    if trial.parameters:
        found = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in trial.parameters.items())
        console.print(f"\nSolver knobs: {found}", soft_wrap=True)
    console.print(f"\n{words.strip_and_tally(trial.choices)}")
    for pattern, choice in fold(trial.choices).items():
        console.print(Text(f"  {pattern}: {choice}", style="dim"), soft_wrap=True)
    print_legend(trial.choices.values(), console)


def _beside(trial: Trial) -> Table:
    """Prediction and measurement, a row each."""
    table = plain_table("", ">peak", ">step", ">host")
    for name, reading in (("predicted", trial.predicted), ("measured", trial.measured)):
        if reading is not None:
            host = format_binary(reading.host_bytes) if reading.host_bytes else "—"
            table.add_row(name, format_bytes(reading.peak_bytes), words.step_of(reading), host)
    return table
