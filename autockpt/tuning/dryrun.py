"""``--dry-run``: trace, solve, predict; no step is measured."""

from __future__ import annotations

from dataclasses import dataclass

from autockpt.errors import InfeasibleError
from autockpt.profiling import Profiled
from autockpt.schema import (
    Budget,
    Choice,
    Prediction,
    ResolvedBudget,
    SearchSpace,
    covers,
    format_bytes,
)
from autockpt.schema.known import NONE, OURS, known_plans
from autockpt.solvers import refine

REFEREE_CALLS = 20


@dataclass(frozen=True)
class Foreseen:
    """What a dry run says: predictions of the known plans and of the solver's, by name, and the solver's choices."""

    budget: ResolvedBudget
    predictions: dict[str, Prediction]
    choices: dict[str, Choice]
    smallest_peak: int
    binding: bool


def foresee(profiled: Profiled, budget: Budget, space: SearchSpace) -> Foreseen:
    """Predict the known plans, resolve the budget by simulated peaks, and solve.

    Raises InfeasibleError, with the smallest reachable peak, where no plan fits by its ghost run.
    """
    predictor, device = profiled.predictor, profiled.predictor.device
    known = known_plans([u.name for u in profiled.blocks], space.choices)
    predictions = {name: predictor.predict(choices) for name, choices in known.items()}
    smallest = plain = profiled.smallest_peak(known.values())
    if profiled.head is not None and budget.kind == "activation_share":
        plain = profiled.smallest_peak(known.values(), plain_head=True)
    size = budget.resolve(predictions[NONE].peak_bytes, plain, device.capacity_bytes - profiled.used_by_others)
    resolved = ResolvedBudget(asked=budget.text, bytes=size, covers=covers(device.kind))
    binding = predictions[NONE].peak_bytes > size
    choices = known[NONE]
    if binding:
        refined = refine(profiled.problem(size - device.overhead_bytes), profiled.rule, max_calls=REFEREE_CALLS)
        if not refined.feasible:
            raise infeasible(profiled, size, smallest)
        choices = profiled.plan(refined.choices)
    predictions[OURS] = predictor.predict(choices)
    return Foreseen(resolved, predictions, choices, smallest, binding)


def infeasible(profiled: Profiled, size: int, smallest: int) -> InfeasibleError:
    """The error for a budget of ``size`` bytes that nothing fits, with what the leanest plan's bytes go to."""
    host = profiled.host_budget
    within = f" with at most {format_bytes(host)} of host memory" if host is not None else ""
    wider = " or --host-budget" if host is not None else ""
    return InfeasibleError(
        f"nothing fits {format_bytes(size)}{within}: "
        f"the leanest plan needs {format_bytes(smallest)}\n{profiled.needs(smallest)}",
        remedy=f"Raise the budget{wider}, or use a smaller --batch-size (with --accumulate to keep its effect), a "
        "shorter --seq-len, --lora, or --optimizer sgd.",
        smallest_peak=smallest,
    )
