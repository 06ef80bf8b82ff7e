"""Fit the profile's prices to what was measured, so that the next solve sees the device as it is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autockpt.schema import Choice, Problem, Trial, option_of

PRIOR_WEIGHT = 0.3  # one measured trial outweighs the profile about three to one
PRIOR_ERROR = 0.2  # of the profile's prices, as a share: what is within the noise of measurements leaves them alone
SCALE_RANGE = (0.2, 5.0)


@dataclass(frozen=True)
class Fit:
    """``seconds ≈ base_seconds + Σ scale[kind] · priced seconds``; ``error_seconds`` is the largest miss so far.

    ``others`` are seconds that choices of units outside of the problem (the output head's) add to that.
    """

    base_seconds: float
    scale: dict[str, float] = field(default_factory=dict)
    error_seconds: float = 0.0
    others: dict[str, float] = field(default_factory=dict)

    def predict(self, problem: Problem, choices: Mapping[str, Choice]) -> float:
        """Step seconds of an assignment. ``problem`` must carry unscaled prices."""
        return self.priced(problem, choices) + sum(self.others.get(name, 0.0) for name in _others(problem, choices))

    def priced(self, problem: Problem, choices: Mapping[str, Choice]) -> float:
        """The same without ``others``."""
        return self.base_seconds + sum(
            self.scale.get(kind, 1.0) * seconds for kind, seconds in _features(problem, choices).items()
        )


def fit(problem: Problem, trials: Sequence[Trial]) -> Fit:
    """Least squares with a prior at the profile's own numbers; robust to few trials.

    ``problem`` must carry unscaled prices.
    """
    scored = [t for t in trials if math.isfinite(t.score_seconds) and priced(problem, t.choices)]
    if not scored:
        return Fit(problem.base_seconds)
    rows = [_features(problem, t.choices) for t in scored]
    kinds = sorted({kind for row in rows for kind in row})
    others = sorted({name for t in scored for name in _others(problem, t.choices)})
    seconds = np.array([t.score_seconds for t in scored])
    matrix = np.array([[1.0] + [row.get(kind, 0.0) for kind in kinds] for row in rows])
    beside = np.array([[float(name in _others(problem, t.choices)) for name in others] for t in scored])
    # The prior pulls each scale to 1 with the weight of a fraction of a typical trial, and with no less than the noise
    # asks for: what a choice adds in all may be less than that, and its scale would be noise. The base is left free.
    spread = np.maximum(np.abs(matrix[:, 1:]).max(axis=0, initial=0.0), 1e-9)
    weight = np.maximum(PRIOR_WEIGHT * spread, _noise_seconds(scored) / PRIOR_ERROR)
    prior = np.hstack([np.zeros((len(kinds), 1)), np.diag(weight), np.zeros((len(kinds), len(others)))])
    left = np.vstack([np.hstack([matrix, beside]), prior])
    right = np.concatenate([seconds, weight])
    solution, *_ = np.linalg.lstsq(left, right, rcond=None)
    priced_kinds, added = solution[1 : 1 + len(kinds)], solution[1 + len(kinds) :]
    scale = {kind: float(np.clip(value, *SCALE_RANGE)) for kind, value in zip(kinds, priced_kinds, strict=True)}
    rest = seconds - matrix[:, 1:] @ np.array([scale[kind] for kind in kinds]) - beside @ added
    partial = Fit(float(np.median(rest)), scale, others=dict(zip(others, map(float, added), strict=True)))
    errors = [abs(partial.predict(problem, t.choices) - t.score_seconds) for t in scored]
    return replace(partial, error_seconds=max(errors))


def _noise_seconds(trials: Sequence[Trial]) -> float:
    """One standard deviation of a measured step time, about."""
    return float(np.median([noise_of(t) * t.score_seconds for t in trials]))


def noise_of(trial: Trial) -> float:
    """One standard deviation of a trial's step seconds, about, as a share: half of what holds in 95 of 100 cases."""
    return trial.measured.noise / 2 if trial.measured is not None else 0.0


def unseen_bytes(trials: Sequence[Trial]) -> int:
    """The most bytes by which a measured peak exceeded its prediction; zero where none did."""
    return max([0, *(t.measured.peak_bytes - t.predicted.peak_bytes for t in trials if t.measured and t.predicted)])


def priced(problem: Problem, choices: Mapping[str, Choice]) -> bool:
    """Whether the problem knows a price for every choice: plans from elsewhere may have others."""
    return all(choices.get(unit.name) in [option.choice for option in unit.options] for unit in problem.units)


def _others(problem: Problem, choices: Mapping[str, Choice]) -> list[str]:
    """What a plan has for units that the problem does not decide on."""
    inside = {unit.name for unit in problem.units}
    return [f"{name}: {choice}" for name, choice in choices.items() if name not in inside and choice.kind != "save"]


def _features(problem: Problem, choices: Mapping[str, Choice]) -> dict[str, float]:
    """Priced extra seconds by choice kind, over all units."""
    total: dict[str, float] = {}
    for unit in problem.units:
        choice = choices[unit.name]
        if choice.kind != "save":
            total[choice.kind] = total.get(choice.kind, 0.0) + option_of(unit, choice).seconds
    return total
