"""``--dry-run``: trace, solve, predict; no step is measured."""

from __future__ import annotations

from dataclasses import dataclass

from autockpt.profiling import CostModel
from autockpt.schema import Budget, Choice, Prediction, SearchSpace
from autockpt.schema.known import NONE, OURS, known_plans
from autockpt.solvers import refine
from autockpt.tuning.infeasible import nothing_fits
from autockpt.tuning.loop import SearchResult
from autockpt.tuning.proposers.solver import smallest_peaks

REFEREE_CALLS = 20


@dataclass(kw_only=True)
class Foreseen(SearchResult):
    """What a dry run says: predictions of the known plans and of the solver's, by name, and the solver's choices."""

    predictions: dict[str, Prediction]
    choices: dict[str, Choice]


def foresee(profiled: CostModel, budget: Budget, space: SearchSpace) -> Foreseen:
    """Predict the known plans, resolve the budget by simulated peaks, and solve.

    Raises InfeasibleError, with the smallest reachable peak, where no plan fits by its ghost run.
    """
    predictor, device = profiled.predictor, profiled.predictor.device
    known = known_plans([u.name for u in profiled.blocks], space.choices)
    predictions = {name: predictor.predict(choices) for name, choices in known.items()}
    smallest, plain = smallest_peaks(profiled, budget, known)
    room = device.capacity_bytes - profiled.used_by_others
    resolved = budget.resolved(predictions[NONE].peak_bytes, plain, room, device.kind)
    binding = predictions[NONE].peak_bytes > resolved.bytes
    choices = known[NONE]
    if binding:
        refined = refine(
            profiled.problem(resolved.bytes - device.overhead_bytes), profiled.rule, max_calls=REFEREE_CALLS
        )
        if not refined.feasible:
            raise nothing_fits(profiled, resolved, smallest)
        choices = profiled.plan(refined.choices)
    predictions[OURS] = predictor.predict(choices)
    return Foreseen(resolved, None, [], binding, smallest, stopped="dry run", predictions=predictions, choices=choices)
