"""``autockpt history`` on screen: runs, the trials of one, one trial in full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autockpt.progress import FITS, STATES
from autockpt.schema import Measurement, Trial, format_binary, format_bytes, words
from autockpt.schema.known import legend_of_names
from autockpt.schema.names import fold
from autockpt.schema.runs import measurements
from autockpt.terminal import heading, plain_table, print_legend, simulated

UNJUDGED = "not known: the budget was not known in bytes yet"


def when(seconds: float) -> str:
    """A time of day, in the machine's own zone: ``2026-11-22 17:05``."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def print_runs(runs: Sequence[tuple[Mapping[str, Any], Trial | None]], console: Console) -> None:
    """Print runs in the order given, each as its facts and its best trial, then in words why a run has none."""
    table = plain_table("run", ">last trial", ">trials", ">best", ">its peak")
    said = []
    for facts, best in runs:
        if why := facts.get("damaged") or facts.get("infeasible"):
            said.append(f"{facts['run']}: {why}")
        if "damaged" in facts:
            continue
        score = best.score if best is not None else None
        step, peak = "—" if why else "none yet", "—"
        if score is not None:
            step, peak = words.step_of(score), format_binary(score.peak_bytes)
        # without the year and the noise, which a narrow terminal has no room for
        date = facts["date"].partition("-")[2]
        table.add_row(facts["run"], date, str(facts["trials"]), step.partition(" ±")[0], peak)
    if table.row_count:
        console.print(table)
    if any(best is not None and best.state == "simulated" for _, best in runs):
        console.print(simulated())
    if said:
        if table.row_count:
            console.print()
        console.print(Text("\n".join(said)), soft_wrap=True)


def print_table(trials: Sequence[Trial], front: Sequence[Trial], console: Console, step_note: str = "") -> None:
    """Print trials in the order given, and what the letters mean."""
    console.print(_trials_table(trials, {t.number for t in front}, console.width))
    console.print()
    letters = ", ".join(f"{letter} {kind}" for letter, kind in words.letters(trial.choices for trial in trials))
    said = f"A letter for each layer, first to last: {letters}; a small letter: for its attention or MLP alone"
    console.print(Text(said, style="dim"))
    print_legend((choice for trial in trials for choice in trial.choices.values()), console)
    for line in legend_of_names(trial.name for trial in trials):
        console.print(Padding.indent(Text(line, style="dim"), 2))
    if front:
        console.print(Text("* on the Pareto front: no other is both faster and leaner", style="dim"))
    if any(t.state == "simulated" for t in trials):
        console.print(simulated(step_note))
    if any(t.feasible is None for t in trials):
        console.print(Text(f"? {UNJUDGED}", style="dim"))
    console.print()


def _trials_table(trials: Sequence[Trial], front: set[int], width: int) -> Table:
    """Number, encoding, peak, step time, verdict, hash and the choices in one line, of one length for all."""
    units = list(dict.fromkeys(name for trial in trials for name in trial.choices))
    table = plain_table("", ">#", "encoding", ">peak", ">step", "fits", "plan", "<choices")
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
    if trial.state == "out_of_memory":
        return Text("OOM", style="red")
    if trial.state == "failed":
        return Text("failed", style="red")
    if trial.feasible is None:
        return Text("?", style="dim")
    return Text("yes", style="green") if trial.feasible else Text("no", style="red")


def print_trial(trial: Trial, readings: Sequence[Trial], console: Console) -> None:
    """One trial in full; ``readings`` are all lines that were written about it, oldest first."""
    console.print(Text(f"Trial {trial.number}: {trial.name}", style="bold"))
    verdict = STATES[trial.state] or FITS[trial.feasible] or UNJUDGED
    console.print(Text(f"{verdict}{f': {trial.message}' if trial.message else ''}"), soft_wrap=True)
    facts = [f"proposed as {trial.encoding}", f"plan {trial.plan_hash}"]
    if trial.elapsed_seconds:
        facts.append(f"ended {words.seconds(trial.elapsed_seconds)} after the search began")
    console.print(Text(", ".join(facts), style="dim"), soft_wrap=True)
    console.print()
    console.print(_beside(trial))
    measured = measurements(readings)
    if len(measured) > 1:
        heading("Measured more than once; the last one counts", console, _readings(measured))
    if trial.parameters:
        console.print()
        said = ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in trial.parameters.items())
        console.print(Text(f"Parameters: {said}"), soft_wrap=True)
    console.print()
    console.print(Text(f"{words.strip(trial.choices)}   {words.tally(trial.choices)}"))
    for pattern, choice in fold(trial.choices).items():
        console.print(Text(f"  {pattern}: {choice}", style="dim"), soft_wrap=True)
    print_legend(trial.choices.values(), console)


def _beside(trial: Trial) -> Table:
    """Prediction next to measurement."""
    table = plain_table("", ">predicted", ">measured", ">measured over predicted")
    predicted, measured = trial.predicted, trial.measured
    expected = predicted.step_seconds if predicted else None

    def add_sizes(name: str, field: str) -> None:
        said, real = (getattr(reading, field, None) for reading in (predicted, measured))
        more = "—" if said is None or real is None else f"{'+' if real > said else ''}{format_binary(real - said)}"
        sizes = "—" if said is None else format_binary(said), "—" if real is None else format_bytes(real)
        table.add_row(name, *sizes, more)

    add_sizes("peak", "peak_bytes")
    table.add_row(
        "step",
        words.seconds(expected) if expected else "—",
        words.step_of(measured),
        words.share(measured.step_seconds / expected - 1, signed=True) if measured and expected else "—",
    )
    if (predicted and predicted.host_bytes) or (measured and measured.host_bytes):
        add_sizes("host", "host_bytes")
    return table


def _readings(measured: Sequence[Measurement]) -> Table:
    table = plain_table(">", ">peak", ">step", ">steps", "<seconds of each step")
    for number, reading in enumerate(measured, 1):
        times = ", ".join(f"{t:.4g}" for t in reading.times) or "—"
        table.add_row(
            str(number), format_binary(reading.peak_bytes), words.step_time(reading), str(reading.steps), times
        )
    return table
