"""``autockpt history`` on screen: the trials of a run and their Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autockpt.report import words
from autockpt.report.style import plain_table
from autockpt.schema import Trial, format_binary

WIDE = 100


def print_trials(trials: Sequence[Trial], front: Sequence[Trial], console: Console) -> None:
    """Print trials in the order given, a ``*`` at those on the front, then the front by itself."""
    console.print(trials_table(trials, {t.number for t in front}, console.width))
    console.print()
    if any(t.state == "simulated" for t in trials):
        console.print(Text("~ simulated, not measured", style="dim"))
        console.print()
    counted = "simulated" if any(t.state == "simulated" for t in front) else "measured"
    console.print(Text(f"Pareto front (no other {counted} trial is both faster and leaner)", style="bold"))
    console.print(front_table(front) if front else "  nothing was measured yet")


def trials_table(trials: Sequence[Trial], front: set[int], width: int) -> Table:
    """Number, encoding, peak, step time, verdict, hash and the choices in one line."""
    table = plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("encoding", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("predicted", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    table.add_column("choices", overflow="fold")
    for trial in trials:
        table.add_row(*_cells(trial, trial.number in front, wide=width >= WIDE, room=max(12, width - 74)))
    return table


def _cells(trial: Trial, on_front: bool, *, wide: bool, room: int) -> list[Text]:
    measured, predicted = trial.measured, trial.predicted
    step = "" if not measured else words.step_time(measured) if wide else words.seconds(measured.step_seconds)
    if not step and predicted and predicted.step_seconds:
        step = f"~{words.seconds(predicted.step_seconds)}"
    return [
        Text("*" if on_front else ""),
        Text(str(trial.number)),
        Text(trial.encoding if trial.encoding != "baseline" else trial.name),
        Text(format_binary(measured.peak_bytes) if measured else "—"),
        Text(format_binary(predicted.peak_bytes) if predicted else "—"),
        Text(step or "—"),
        _fits(trial),
        Text(trial.plan_hash[:8]),
        Text(words.strip(trial.choices, room)),
    ]


def _fits(trial: Trial) -> Text:
    if trial.state == "duplicate":
        return Text(f"= {trial.duplicate_of}" if trial.duplicate_of is not None else "known", style="dim")
    if trial.state == "out_of_memory":
        return Text("OOM", style="red")
    if trial.state == "failed":
        return Text("failed", style="red")
    return Text("yes", style="green") if trial.feasible else Text("no", style="red")


def _score_time(trial: Trial) -> str:
    if trial.measured is not None:
        return words.step_time(trial.measured)
    return f"~{words.seconds(trial.score_seconds)}" if trial.score is not None and trial.score.step_seconds else "—"


def front_table(front: Sequence[Trial]) -> Table:
    """The front, leanest first."""
    table = plain_table()
    for title, justify in (("peak", "right"), ("step", "right"), ("fits", "left"), ("#", "right"), ("name", "left")):
        table.add_column(title, justify=justify, no_wrap=title != "name")  # type: ignore[arg-type]
    for trial in front:
        if trial.score is not None:
            peak, step = format_binary(trial.score.peak_bytes), _score_time(trial)
            table.add_row(Text(peak), Text(step), _fits(trial), Text(str(trial.number)), Text(trial.name))
    return table
