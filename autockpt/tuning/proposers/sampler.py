"""Optuna behind one small class: ask for parameters, tell what was measured. The only importer of optuna."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import TrialState

from autockpt.errors import RunDirectoryError, without_passwords
from autockpt.measuring.failures import chain
from autockpt.schema import Choice, ResolvedBudget, Trial, label
from autockpt.schema.files import FULL
from autockpt.schema.names import fold
from autockpt.schema.space import Encoding, Knob, Sampler
from autockpt.tuning.trials import Parameters


class Study:
    """One study of ``knobs``, or with the encoding "layers" of ``menus``, the choices of each unit.

    ``storage`` None keeps it in memory. The study ``name`` belongs to one run, which no second process works on: trials
    that a killed search of this run left are marked as failed.

    A trial that ran out of memory or over the budget is reported as complete, with its predicted time and a positive
    violation: reported as failed it would teach the sampler nothing.
    """

    def __init__(
        self,
        encoding: Encoding,
        sampler: Sampler,
        knobs: Mapping[str, Knob],
        menus: Mapping[str, Sequence[Choice]],
        *,
        name: str,
        storage: str | None,
        seed: int,
    ) -> None:
        logging.getLogger("alembic").setLevel(logging.ERROR)
        self._queue: deque[Mapping[str, Any]] = deque()
        self.distributions: dict[str, BaseDistribution] = {
            name: FloatDistribution(knob.low, knob.high, log=knob.log) for name, knob in knobs.items()
        }
        if encoding == "layers":
            self.distributions = {unit: CategoricalDistribution(tuple(map(label, own))) for unit, own in menus.items()}
            # Optuna refuses to mix trials over other menus, which a profile made anew may bring
            name += f"-{hashlib.sha256(repr(sorted(self.distributions.items())).encode()).hexdigest()[:8]}"
        self._open: dict[int, optuna.Trial] = {}
        self._storage = storage or "memory"
        with _in_words(self._storage):
            self._study = optuna.create_study(
                study_name=name,
                storage=storage,
                sampler=_sampler(sampler, seed),
                direction="minimize",
                load_if_exists=True,
            )
            self._reap()

    def _reap(self) -> None:
        """Trials left running or waiting by a killed search would hold their place for ever."""
        for _ in self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            self._study.ask()  # only what runs can be marked as failed
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def leave_out(self, knob: str) -> None:
        """From now on points have no such number; nothing happens where they had none."""
        self.distributions.pop(knob, None)

    def enqueue(self, points: Iterable[Mapping[str, Any]]) -> None:
        """Try these points before the sampler's own, again where they were tried: what they mean may have changed."""
        self._queue.extend(points)

    def ask(self) -> tuple[int, Parameters]:
        """The next point to try: Optuna's trial number and its parameters."""
        with _in_words(self._storage), warnings.catch_warnings(action="ignore"):
            if self._queue:  # one at a time: what is not asked for leaves no trace in the study
                self._study.enqueue_trial(dict(self._queue.popleft()))
            trial = self._study.ask(self.distributions)
        self._open[trial.number] = trial
        return trial.number, dict(trial.params)

    def tell(self, number: int, seconds: float, violation: float, record: Trial) -> None:
        """What became of it: step seconds (measured, or predicted where it did not fit) and the budget's violation.

        ``violation`` is (peak − budget) / budget: zero or less where the plan fits.
        """
        trial = self._open.pop(number)
        with _in_words(self._storage):
            trial.set_constraint("over_budget", violation)
            trial.set_user_attr("plan_hash", record.plan_hash)
            trial.set_user_attr("choices", {name: str(c) for name, c in record.choices.items()})
            trial.set_user_attr("trial", record.number)
            self._study.tell(trial, seconds)

    def fail(self, number: int) -> None:
        """The trial could not be completed for a reason that says nothing about its parameters."""
        with _in_words(self._storage):
            self._study.tell(self._open.pop(number), state=TrialState.FAIL)


MIB = 2**20


def show_trials(storage: str, name: str, trials: Sequence[Trial], budget: ResolvedBudget) -> None:
    """Write the study ``name`` for people and their tools, over an earlier one: every trial once, as it stands now.

    Its values are step seconds and peak MiB; its parameters say how many layers do what, so that baselines have them,
    too; its constraint is the budget. A trial without numbers is there as failed, with the reason. Raises
    RunDirectoryError where the storage cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds = sorted({c.kind for trial in trials for c in trial.choices.values()} - {"save"})
    with _in_words(storage):
        if name in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name=name, storage=storage)
        study = optuna.create_study(study_name=name, storage=storage, directions=["minimize", "minimize"])
        with warnings.catch_warnings(action="ignore"):  # metric names are marked experimental
            study.set_metric_names(["step seconds", "peak MiB"])
        study.set_user_attr("budget", budget.asked)
        study.set_user_attr("budget MiB", budget.bytes / MIB)
        study.add_trials(_timed(trials, [_shown(trial, kinds, budget) for trial in trials]))


def _shown(trial: Trial, kinds: Sequence[str], budget: ResolvedBudget) -> optuna.trial.FrozenTrial:
    """One trial for ``show_trials``."""
    layers = len(trial.choices)
    counts = {kind: sum(choice.kind == kind for choice in trial.choices.values()) for kind in kinds}
    attrs: dict[str, Any] = {"trial": trial.number, "name": trial.name, "from": trial.encoding, "state": trial.state}
    attrs |= {"plan": trial.plan_hash, **trial.parameters, **({"why": trial.message} if trial.message else {})}
    if trial.predicted is not None:
        attrs["predicted peak MiB"] = trial.predicted.peak_bytes / MIB
        attrs |= {"predicted step seconds": trial.predicted.step_seconds} if trial.predicted.step_seconds else {}
    if trial.measured is not None:
        attrs["noise"] = trial.measured.noise
    attrs |= {unit: str(choice) for unit, choice in fold(trial.choices).items()}
    score = trial.score
    over = None if score is None else score.peak_bytes / budget.bytes - 1
    values = None
    if score is not None and score.step_seconds is not None:
        values = [score.step_seconds, score.peak_bytes / MIB]
    return optuna.trial.create_trial(
        state=TrialState.FAIL if values is None else TrialState.COMPLETE,
        values=values,
        params={f"{kind} layers": count for kind, count in counts.items()},
        distributions={f"{kind} layers": IntDistribution(0, max(layers, 1)) for kind in kinds},
        user_attrs=attrs | ({"over budget": over} if over is not None else {}),
        constraints={"over budget": over} if over is not None else None,
        # where optuna-dashboard looks for them
        system_attrs={"constraints": [over]} if over is not None else None,
    )


def _timed(trials: Sequence[Trial], shown: Sequence[optuna.trial.FrozenTrial]) -> Sequence[optuna.trial.FrozenTrial]:
    """When each trial ran, counted back from now, as a search that has just ended went on without a break."""
    ends = [trial.elapsed_seconds for trial in trials]
    began = datetime.now() - timedelta(seconds=max(ends, default=0.0))
    for one, end in zip(shown, ends, strict=True):
        before = max((other for other in ends if other < end), default=0.0)
        one.datetime_start, one.datetime_complete = (began + timedelta(seconds=at) for at in (before, end))
    return shown


@contextmanager
def _in_words(storage: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # optuna passes on whatever the database driver raises
        raise _unusable(storage, error) from error


def _unusable(storage: str, error: Exception) -> RunDirectoryError:
    """The error for a study that cannot be used; a password in its URL is not repeated."""
    shown = without_passwords(storage)
    # what the system or the database said is behind what Optuna makes of it
    if any(getattr(one, "errno", None) in FULL or "disk is full" in str(one) for one in chain(error)):
        return RunDirectoryError(
            f"the disk with the Optuna study at {shown} is full",
            remedy="Free space there, and the same command continues; or give another folder with --out.",
        )
    said = next(iter(str(error).splitlines()), "") or type(error).__name__
    if storage.startswith("sqlite:"):
        remedy = "Move the file away (nothing in it was changed), name another --storage, or use --fresh."
    else:
        remedy = (
            "Give --storage an SQLAlchemy URL, as sqlite:///study.db, whose database is there and has its driver. "
            "Set AUTOCKPT_STORAGE to a URL that holds a password, or keep a PostgreSQL server's in ~/.pgpass."
        )
    said = without_passwords(said, storage)
    return RunDirectoryError(f"the Optuna study at {shown} cannot be used: {said}", remedy=remedy)


def _sampler(name: Sampler, seed: int) -> BaseSampler:
    with warnings.catch_warnings(action="ignore"):  # multivariate TPE is marked experimental
        if name == "gp":
            return GPSampler(seed=seed, n_startup_trials=4)
        if name == "tpe":
            return TPESampler(seed=seed, multivariate=True, n_startup_trials=6)
        if name == "random":
            return RandomSampler(seed=seed)
        return NSGAIISampler(seed=seed, population_size=12)  # Optuna's 50 are more than a search has trials
