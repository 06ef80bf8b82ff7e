"""A run for people in Python: its trials, its front, and the plan of any trial."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from autockpt.errors import UsageError
from autockpt.history.rundir import RunDirectory
from autockpt.history.trialplan import plan_of_trial, trial_of
from autockpt.history.trials import best, pareto_front
from autockpt.schema import Plan, Trial
from autockpt.schema.arguments import python_door


@python_door
def open_run(path: str | Path) -> Run:
    """The run in a directory that a search made. Raises RunDirectoryError where there is none."""
    return Run(RunDirectory.open(path))


class Run:
    """What a search tried and found, as its directory says at the time of the first look. Bytes and seconds."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def __repr__(self) -> str:
        return f"<autockpt run {self.path.name}: {len(self.trials)} trials>"

    @property
    def path(self) -> Path:
        """The run's directory."""
        return self._directory.path

    @property
    def question(self) -> dict[str, Any]:
        """What was asked: workload, budget, device, search space, versions."""
        return dict(self._directory.question)

    @cached_property
    def trials(self) -> list[Trial]:
        """All trials by number; what was measured more than once as it was measured last."""
        return self._directory.trials()

    @property
    def pareto_front(self) -> list[Trial]:
        """Trials that no other is both leaner and faster than, leanest first, whether they fit the budget or not."""
        return pareto_front(self.trials)

    @python_door
    def best(self, count: int = 1) -> list[Trial]:
        """The fastest plans that fit, fastest first; fewer where no more were tried."""
        return best(self.trials, count)

    @property
    def plan(self) -> Plan | None:
        """The answer of the search; None where there is none yet."""
        return self._directory.plan()

    @python_door
    def plan_of(self, number: int) -> Plan:
        """The plan of a trial. Raises RunDirectoryError for a number that the run does not have."""
        return plan_of_trial(self._directory, trial_of(self._directory, number))

    @python_door
    def frame(self) -> Any:
        """The trials as a pandas DataFrame, a row each, by number. Raises UsageError where pandas is not installed."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise UsageError("a DataFrame needs pandas", remedy="pip install pandas, or use `trials`.") from None
        return pandas.DataFrame([row(trial) for trial in self.trials]).set_index("number", drop=False)


def row(trial: Trial) -> dict[str, Any]:
    """A trial in one row of plain values; None for what is not known."""
    score, predicted, measured = trial.score, trial.predicted, trial.measured
    return {
        "number": trial.number,
        "name": trial.name,
        "encoding": trial.encoding,
        "state": trial.state,
        "feasible": trial.feasible,
        "peak_bytes": score.peak_bytes if score is not None else None,
        "step_seconds": score.step_seconds if score is not None else None,
        "noise": measured.noise if measured is not None else None,
        "steps": measured.steps if measured is not None else None,
        "host_bytes": score.host_bytes if score is not None else None,
        "predicted_peak_bytes": predicted.peak_bytes if predicted is not None else None,
        "predicted_step_seconds": predicted.step_seconds if predicted is not None else None,
        "plan_hash": trial.plan_hash,
        "elapsed_seconds": trial.elapsed_seconds,
        "message": trial.message,
    }
