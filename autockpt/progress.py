"""The progress of a search: a bar on a terminal, one line per trial elsewhere. Both are listeners."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from autockpt.schema import Trial, format_binary, words

QUIET = 5.0  # seconds without a line after which a stage says how far it is; twice as many before the next time
SILENT = 2.0  # seconds after which a trial says how far its stage is
LOOKS = 1.0  # seconds between two looks whether it is time for that
SHOWN = 0.1  # seconds of compiling that are worth a word
STATES = {
    "measured": "",
    "simulated": "",
    "out_of_memory": "out of memory",
    "over_budget": "over the budget",
    "predicted_over": "predicted over the budget",
    "failed": "failed",
}
FITS = {True: "fits", False: "over the budget", None: ""}


class LineListener:
    """One line per stage and trial, for logs and pipes: ``say`` gets them. ``clock`` returns seconds.

    As a context manager it also says, from a thread of its own, that a stage about which nothing is heard for ``quiet``
    seconds still runs. ``brief``: stages and trials have no lines of their own.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        quiet: float = QUIET,
        brief: bool = False,
    ) -> None:
        self._say, self._clock, self._least_quiet, self._brief = say, clock, quiet, brief
        self.trials, self._best = 0, ""
        self._stage, self._total, self._done = "", 0, 0
        self._start = self._told = self._began = self._came = clock()
        self._quiet = quiet
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> LineListener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def stage(self, name: str, total: int | None = None) -> None:
        with self._lock:
            self._stage, self._total, self._done, self._quiet = name, total or 0, 0, self._least_quiet
            self._began = self._came = self._clock()
            if not self._brief:
                self._line(f"{name} …")

    def advance(self, steps: int = 1) -> None:
        with self._lock:
            self._done += steps
            self._came = self._clock()

    def trial(self, trial: Trial, best: Trial | None) -> None:
        self.advance()
        with self._lock:
            self.trials, self._best = self.trials + 1, f", best {describe_numbers(best)}" if best else ""
            left = self._left() if self._clock() - self._began > SILENT else ""
            if not self._brief:
                self._line(describe_trial(trial, best) + (f"  ({left})" if left else ""))

    def note(self, text: str) -> None:
        with self._lock:
            self._line(text)

    def pulse(self) -> None:
        """After a while without output print that the stage still runs: what is left, or how long it took."""
        with self._lock:
            now = self._clock()
            if self._stage and now - self._told >= self._quiet:
                self._quiet *= 2
                self._line(f"{self._stage}: {self._left() or f'{words.seconds(now - self._began)} so far'}{self._best}")

    def _watch(self) -> None:
        while not self._ended.wait(LOOKS):
            self.pulse()

    def _left(self) -> str:
        """How far the stage is, and what is left of it by the steps that are over; "" where nothing tells."""
        if not 0 < self._done < self._total:
            return ""
        elapsed, since = self._clock() - self._began, self._clock() - self._came
        # of the steps that are over, or as far as the present one has come
        each = max((elapsed - since) / self._done, elapsed / (self._done + 1))
        left = max(each, each * (self._total - self._done) - since)
        # without tenths, which are unknown
        rough = f"{max(round(left), 1)} s" if left < 99.5 else words.seconds(left)
        return f"{self._done} of {self._total}, about {rough} left"

    def _line(self, text: str) -> None:
        self._told = self._clock()
        self._say(f"[{self._told - self._start:6.1f} s] {text}")


class BarListener:
    """A bar for the current stage, with the best plan so far next to it; notes scroll above."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[best]}", style="dim"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", best="", visible=False)  # until the first stage

    def __enter__(self) -> BarListener:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total, best="")

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)

    def trial(self, trial: Trial, best: Trial | None) -> None:
        text = f"best {describe_numbers(best)}" if best else "nothing fits yet"
        self._progress.update(self._task, advance=1, best=text)

    def note(self, text: str) -> None:
        self._console.print(Text(text))


def listener(console: Console) -> LineListener | BarListener:
    """The listener that suits where standard error goes."""
    if console.is_terminal and not console.is_dumb_terminal:
        return BarListener(console)
    return LineListener(lambda line: console.print(Text(line), soft_wrap=True))


def describe_trial(trial: Trial, best: Trial | None) -> str:
    """One line: number, name, what became of it, and whether it is the best so far."""
    verdict = STATES[trial.state] or FITS[trial.feasible]
    numbers = describe_numbers(trial)
    compiling = trial.measured.compile_seconds if trial.measured is not None else 0.0
    compiled = f"compiled in {words.seconds(compiling)}" if compiling >= SHOWN else ""
    parts = [f"trial {trial.number:>3}  {trial.name}", numbers, compiled, verdict, trial.message]
    if best is not None and best.number == trial.number:
        parts.append("best so far")
    return "  ".join(p for p in parts if p)


def describe_numbers(trial: Trial) -> str:
    """Step time and peak: measured, simulated where the search measures nothing, else as predicted (``~``)."""
    if trial.measured:
        return f"{words.step_time(trial.measured)}, {format_binary(trial.measured.peak_bytes)}"
    if trial.predicted:
        step = f"{words.seconds(trial.predicted.step_seconds)}, " if trial.predicted.step_seconds else ""
        how = "simulated " if trial.state == "simulated" else "~"
        return f"{how}{step}{format_binary(trial.predicted.peak_bytes)}"
    return ""
