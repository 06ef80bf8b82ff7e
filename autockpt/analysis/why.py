"""Why the plan is as it is: the next leaner and the next faster plan, and the best plans for other budgets."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autockpt.analysis.explanation import BudgetRow, Reach, Why
from autockpt.cost import CostModel
from autockpt.errors import InfeasibleError
from autockpt.schema import Choice, Prediction, Profile, ResolvedBudget, SearchRequest, format_binary, plan_hash
from autockpt.schema.baselines import NONE
from autockpt.schema.run_directory import RunDirectory
from autockpt.tuning.loop import Loop
from autockpt.tuning.outlook import look_around
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.targets.simulated import Simulated
from autockpt.tuning.trials import AS_FAST, Trials

SHARES = (100, 80, 60, 40, 20, 0)  # per cent of the activation range


class PredictedPlans:
    """Plans with their predictions, with which the explained plan is compared. ``saving`` saves everything."""

    def __init__(self, saving: Mapping[str, Choice], plain: Prediction) -> None:
        self._saving, self._plain_seconds = saving, plain.step_seconds or 0.0
        self._reaches: dict[str, Reach] = {}
        self.keep(saving, plain)

    @property
    def save_all(self) -> Reach:
        return self._reaches[plan_hash(self._saving)]

    @property
    def lean(self) -> Reach:
        return min(self._reaches.values(), key=lambda reach: (reach.peak_bytes, reach.step_seconds))

    def keep(self, choices: Mapping[str, Choice], predicted: Prediction) -> None:
        """Add a plan; the last prediction of a plan counts."""
        seconds, base = predicted.step_seconds or 0.0, self._plain_seconds
        self._reaches[plan_hash(choices)] = Reach(
            peak_bytes=predicted.peak_bytes,
            step_seconds=seconds,
            overhead=seconds / base - 1 if base > 0 else None,
            choices={**self._saving, **choices},
        )

    def reach(self, choices: Mapping[str, Choice]) -> Reach:
        """What one of the plans comes to."""
        return self._reaches[plan_hash(choices)]

    def at(self, budget_bytes: int) -> Reach | None:
        """The fastest plan within a budget; None where none fits."""
        fitting = [reach for reach in self._reaches.values() if reach.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda reach: (reach.step_seconds, reach.peak_bytes), default=None)

    def faster(self, chosen: Reach, room: int) -> Reach | None:
        """The leanest plan that is faster than this one and needs more than ``room``."""
        faster = [r for r in self._reaches.values() if r.peak_bytes > room and is_faster(r, chosen)]
        return min(faster, key=lambda reach: (reach.peak_bytes, reach.step_seconds), default=None)


def recorded(run: RunDirectory, profile: Profile, saving: Mapping[str, Choice]) -> PredictedPlans:
    """The plans that a run's search tried or ghost-ran."""
    context_bytes = profile.op_times.device.overhead_bytes
    plain = Prediction(peak_bytes=profile.save_all_peak_bytes + context_bytes, step_seconds=profile.save_all_seconds)
    known = PredictedPlans(saving, plain)
    outlook = run.outlook()
    for ghost in outlook.plans if outlook is not None else ():
        if ghost.predicted.step_seconds is not None:
            known.keep(ghost.choices, ghost.predicted)
    for trial in run.trials():
        refuted = trial.state in ("failed", "out_of_memory") and trial.plan_hash != plan_hash(saving)
        if refuted:  # by real steps
            known._reaches.pop(trial.plan_hash, None)
        elif trial.predicted is not None and trial.predicted.step_seconds is not None:
            known.keep(trial.choices, trial.predicted)
    return known


def searched(request: SearchRequest, cost_model: CostModel, target: Simulated) -> tuple[PredictedPlans, Trials]:
    """The plans that a simulated search tries, and those for other budgets; its trials know the budget in bytes."""
    trials = Trials(None, target.clock)
    proposer = SolverProposer(request, cost_model, target, trials, {})
    saving = proposer.baselines[NONE]
    known = PredictedPlans(saving, cost_model.predictor.predict(saving))
    try:
        loop = Loop(proposer, target, trials)
        loop.run()
        if loop.interrupted:
            raise KeyboardInterrupt
        plans = look_around(cost_model, loop, None, math.inf).plans  # the same ones on a busy machine
    except InfeasibleError:
        plans = cost_model.predictor.ghost_runs
    for tried in (*trials.all, *plans):
        if tried.predicted is not None:
            known.keep(tried.choices, tried.predicted)
    return known, trials


def is_faster(one: Reach, other: Reach) -> bool:
    """Whether a plan is faster than another by more than a search tells apart."""
    return one.step_seconds < other.step_seconds - AS_FAST * other.step_seconds


def why(known: PredictedPlans, choices: Mapping[str, Choice], budget_bytes: int | None) -> Why:
    """A plan among its neighbours. ``choices`` need not be the solver's, nor within the budget."""
    chosen = known.reach(choices)
    room = chosen.peak_bytes if budget_bytes is None else max(budget_bytes, chosen.peak_bytes)
    best = known.at(room)
    return Why(
        chosen=chosen,
        best=best if best is not None and is_faster(best, chosen) else None,
        leaner=known.at(chosen.peak_bytes - 1),
        faster=known.faster(chosen, room),
    )


def budget_rows(known: PredictedPlans, budget: ResolvedBudget | None, chosen: Reach) -> tuple[BudgetRow, ...]:
    """What budgets between saving everything and the leanest plan buy, most bytes first; the one asked for buys the
    ``chosen`` plan where no other is faster by more than a search tells apart."""
    high, low = known.save_all.peak_bytes, known.lean.peak_bytes
    asked = budget.bytes if budget is not None else None
    sizes = {low + (high - low) * share // 100 for share in SHARES} | ({asked} if asked is not None else set())
    rows: list[BudgetRow] = []
    seen: set[str] = set()
    for size in sorted(sizes):
        best, ours = known.at(size), size == asked
        if ours and best is not None and chosen.peak_bytes <= size and not is_faster(best, chosen):
            best = chosen
        key = plan_hash(best.choices) if best else format_binary(size)
        if ours:  # a budget that buys the very plan of another one is left out, the one asked for never
            rows = [r for r in rows if r.reach is None or best is None or r.reach.choices != best.choices]
        if ours or key not in seen:
            rows.append(BudgetRow(budget_bytes=size, reach=best, ours=ours))
        seen.add(key)
    return tuple(reversed(rows))
