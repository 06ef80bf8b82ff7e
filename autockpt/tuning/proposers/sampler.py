"""The sampler of the solver's knobs: Optuna behind one small class that asks for parameters and reports results.

No other module imports optuna.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import FloatDistribution
from optuna.samplers import BaseSampler, GPSampler
from optuna.trial import TrialState

from autockpt.errors import RunDirectoryError, without_passwords
from autockpt.measuring.failures import chained
from autockpt.schema import Trial
from autockpt.schema.files import FULL
from autockpt.schema.names import fold
from autockpt.tuning.trials import HIDDEN_COPIES, Parameters

MIB = 2**20
RANGES = {
    "margin": FloatDistribution(0.0, 0.08),
    "recompute_price": FloatDistribution(0.5, 2.0, log=True),
    "offload_price": FloatDistribution(0.1, 5.0, log=True),
    HIDDEN_COPIES: FloatDistribution(0.0, 1.0),
}
"""The knobs: the share of the budget that the solver leaves free, factors on the seconds of choices (copies may hide
behind more than the profile assumes), and the share of copies that overlap other layers' compute."""
NEUTRAL: Parameters = {"margin": 0.0, "recompute_price": 1.0, "offload_price": 1.0, HIDDEN_COPIES: 0.0}
"""The values that change nothing."""


def knobs_for(kinds: Container[str], *, copies_hide: bool) -> list[str]:
    """The knobs that matter for these kinds of choices; ``copies_hide``: copies overlap compute on the device."""
    offloads = "offload" in kinds
    used = {"recompute_price": "recompute" in kinds, "offload_price": offloads, HIDDEN_COPIES: offloads and copies_hide}
    return [knob for knob in RANGES if used.get(knob, True)]


class Study:
    """One Optuna study of the ``knobs`` that steer the solver.

    ``storage`` None keeps it in memory. The study ``name`` belongs to one run, which is locked. So trials that are
    still running were left by a killed search, and are marked as failed.

    A trial that ran out of memory or over the budget is reported as complete, with its predicted time and a positive
    constraint violation: a failed trial would teach the sampler nothing.
    """

    def __init__(self, sampler: BaseSampler, knobs: Iterable[str], *, name: str, storage: str | None) -> None:
        logging.getLogger("alembic").setLevel(logging.ERROR)
        self._queue: deque[Mapping[str, Any]] = deque()
        self.knobs = [*knobs]
        self._open: dict[int, optuna.Trial] = {}
        self._storage = storage or "memory"
        with _in_words(self._storage):
            self._study = optuna.create_study(study_name=name, storage=storage, sampler=sampler, load_if_exists=True)
            with warnings.catch_warnings(action="ignore"):  # metric names are marked experimental
                self._study.set_metric_names(["step seconds"])
            for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):  # of a killed search
                self._study.tell(trial.number, state=TrialState.FAIL)

    def enqueue(self, points: Iterable[Mapping[str, Any]]) -> None:
        """Try these points before the sampler's own, even if tried before: their plans may have changed since."""
        self._queue.extend(points)

    def ask(self) -> tuple[int, Parameters]:
        """The next point to try: Optuna's trial number and its parameters."""
        with _in_words(self._storage), warnings.catch_warnings(action="ignore"):
            if self._queue:  # one at a time: points that are never asked for leave no trace in the study
                self._study.enqueue_trial(dict(self._queue.popleft()))
            trial = self._study.ask({knob: RANGES[knob] for knob in self.knobs})
        self._open[trial.number] = trial
        return trial.number, dict(trial.params)

    def tell(self, number: int, seconds: float, violation: float, record: Trial) -> None:
        """Report a result: step seconds (measured, or predicted where it did not fit) and the violation of the budget.

        ``violation`` is (peak − budget) / budget: zero or less where the plan fits.
        """
        trial = self._open.pop(number)
        with _in_words(self._storage):
            trial.set_constraint("over_budget", violation)
            trial.set_user_attr("trial", record.number)
            trial.set_user_attr("state", record.state)
            trial.set_user_attr("plan", record.plan_hash)
            trial.set_user_attr("choices", {units: str(choice) for units, choice in fold(record.choices).items()})
            if (known := record.measured or record.predicted) is not None:
                trial.set_user_attr("peak MiB", known.peak_bytes / MIB)
            self._study.tell(trial, seconds)

    def fail(self, number: int) -> None:
        """Report that a trial failed for a reason that has nothing to do with its parameters."""
        with _in_words(self._storage):
            self._study.tell(self._open.pop(number), state=TrialState.FAIL)


@contextmanager
def _in_words(storage: str) -> Iterator[None]:
    """Turn any error of the database driver into RunDirectoryError, without the password of its URL."""
    try:
        yield
    except Exception as error:
        shown = without_passwords(storage)
        # the error of the system or the database is among the causes of Optuna's
        if any(getattr(one, "errno", None) in FULL or "disk is full" in str(one) for one in chained(error)):
            raise RunDirectoryError(
                f"the disk with the Optuna study at {shown} is full",
                remedy="Free space there, and the same command continues; or give another folder with --out.",
            ) from error
        why = without_passwords(next(iter(str(error).splitlines()), "") or type(error).__name__, storage)
        remedy = "Move the file away (nothing in it was changed), name another --storage, or use --fresh."
        if not storage.startswith("sqlite:"):
            remedy = (
                "Give --storage an SQLAlchemy URL, as sqlite:///study.db, whose database is there and has its driver. "
                "Set AUTOCKPT_STORAGE to a URL that holds a password, or keep a PostgreSQL server's in ~/.pgpass."
            )
        raise RunDirectoryError(f"the Optuna study at {shown} cannot be used: {why}", remedy=remedy) from error


def sampler_for(seed: int) -> BaseSampler:
    """A Gaussian process over the few numbers that steer the solver."""
    return GPSampler(seed=seed, n_startup_trials=4)
