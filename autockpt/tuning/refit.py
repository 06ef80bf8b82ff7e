"""Fit the cost of each kind of choice to the measured trials.

Op times miss what happens between ops. So the solver plans with costs that are scaled to what plans really took.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autockpt.schema import SAVE, Choice, Trial
from autockpt.schema.choices import choice_kinds
from autockpt.solvers.problem import Problem, option_of

PRIOR_WEIGHT = 0.3  # a measured trial outweighs the profile about three to one
PRIOR_ERROR = 0.2  # relative error of the profiled costs: trials whose noise is larger do not change them
HEAD_WEIGHT = 0.03  # the same as PRIOR_WEIGHT for choices of the output head alone
SCALE_RANGE = (0.2, 5.0)


@dataclass(frozen=True)
class Fit:
    """``seconds ≈ base_seconds + Σ scale[kind] · profiled seconds``; ``error_seconds`` is the largest miss so far."""

    base_seconds: float
    scale: dict[str, float] = field(default_factory=dict)
    error_seconds: float = 0.0

    def predict(self, problem: Problem, choices: Mapping[str, Choice]) -> float:
        """Step seconds of an assignment. ``problem`` must have unscaled costs."""
        return self.base_seconds + sum(
            self.scale.get(kind, 1.0) * seconds for kind, seconds in _features(problem, choices).items()
        )


def fit(problem: Problem, trials: Sequence[Trial]) -> Fit:
    """Least squares with a prior at the profiled costs, so that a few trials are enough.

    ``problem`` must have unscaled costs.
    """
    head_only = set(choice_kinds("head")) - set(choice_kinds("block"))
    scored = [t for t in trials if math.isfinite(t.score_seconds) and offers(problem, t.choices)]
    if not scored:
        return Fit(problem.base_seconds)
    rows = [_features(problem, t.choices) for t in scored]
    kinds = sorted({kind for row in rows for kind in row})
    seconds = np.array([t.score_seconds for t in scored])
    matrix = np.array([[1.0] + [row.get(kind, 0.0) for kind in kinds] for row in rows])
    # The prior pulls each scale to 1 with the weight of a fraction of a typical trial, or more where steps are noisy: a
    # choice may add less than the noise, which would then decide its scale. The base is free. The cost of the output
    # head nearly is, as it is a small difference of large numbers whose sign is unsure.
    head = np.array([kind in head_only for kind in kinds], dtype=bool)
    spread = np.maximum(np.abs(matrix[:, 1:]).max(axis=0, initial=0.0), 1e-9)
    noises = [noise_of(t) * t.score_seconds for t in of_known_noise(scored) or scored]
    noise_seconds = float(np.median(noises))  # one standard deviation, about
    noisy = np.where(head, 0.0, noise_seconds / PRIOR_ERROR)
    weight = np.maximum(np.where(head, HEAD_WEIGHT, PRIOR_WEIGHT) * spread, noisy)
    left = np.vstack([matrix, np.hstack([np.zeros((len(kinds), 1)), np.diag(weight)])])
    solution, *_ = np.linalg.lstsq(left, np.concatenate([seconds, weight]), rcond=None)
    low, high = np.where(head, -np.inf, SCALE_RANGE[0]), np.where(head, np.inf, SCALE_RANGE[1])
    scale = dict(zip(kinds, map(float, np.clip(solution[1:], low, high)), strict=True))
    rest = seconds - matrix[:, 1:] @ np.array([scale[kind] for kind in kinds])
    partial = Fit(float(np.median(rest)), scale)
    errors = [abs(partial.predict(problem, t.choices) - t.score_seconds) for t in scored]
    return replace(partial, error_seconds=max(errors))


def expected_seconds(problem: Problem, trials: Sequence[Trial]) -> dict[int, float]:
    """Step seconds of measured trials by number, predicted from their ghost runs and the fitted costs.

    ``problem`` must have unscaled costs. Only ratios of the results are used.
    """
    scale, expected = fit(problem, trials).scale, dict[int, float]()
    for trial in trials:
        seconds = trial.predicted.step_seconds if trial.predicted is not None else None
        if trial.measured is None or seconds is None or not offers(problem, trial.choices):
            continue
        for kind, profiled in _features(problem, trial.choices).items():
            seconds += (scale.get(kind, 1.0) - 1.0) * profiled
        expected[trial.number] = max(seconds, 1e-9)
    return expected


def noise_of(trial: Trial) -> float:
    """About one standard deviation of a trial's step seconds, as a share: half of its 95 % interval's half width."""
    return trial.measured.noise / 2 if trial.measured is not None else 0.0


def of_known_noise(trials: Sequence[Trial]) -> list[Trial]:
    """Trials whose noise is known, which that of a single step is not."""
    return [trial for trial in trials if trial.measured is None or trial.measured.noise < 1.0]


def unseen_bytes(trials: Sequence[Trial]) -> int:
    """The most bytes by which a measured peak exceeded its prediction; 0 where none did."""
    return max([0, *(t.measured.peak_bytes - t.predicted.peak_bytes for t in trials if t.measured and t.predicted)])


def offers(problem: Problem, choices: Mapping[str, Choice]) -> bool:
    """Whether the problem offers every choice of a plan; one of another search may have others."""
    offered = {unit.name: [option.choice for option in unit.options] for unit in problem.units}
    return all(choice in offered.get(name, [SAVE]) for name, choice in choices.items())


def _features(problem: Problem, choices: Mapping[str, Choice]) -> dict[str, float]:
    """Extra seconds by kind of choice, over all units."""
    total: dict[str, float] = {}
    for unit in problem.units:
        choice = choices.get(unit.name, SAVE)
        if choice != SAVE:
            total[choice.kind] = total.get(choice.kind, 0.0) + option_of(unit, choice).seconds
    return total
