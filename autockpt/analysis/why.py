"""Why this plan: its neighbours in bytes, what the bytes between them cost, and what other budgets buy."""

from __future__ import annotations

from collections.abc import Mapping

from autockpt.analysis.explanation import BudgetStep, Reach, Why
from autockpt.cost import CostModel
from autockpt.schema import Choice, Prediction, Profile, ResolvedBudget, format_binary, plan_hash
from autockpt.schema.known import NONE, known_plans
from autockpt.schema.runs import RunDirectory
from autockpt.solvers import Checked, refine, refine_segmented
from autockpt.solvers.refine import Offsets

CALLS = 4  # ghost runs that one question may take
TABLE_CALLS = 2  # and one line of the table of budgets
FRAGMENTED = 2  # times that a budget is tried, less each time by what fragmentation takes
SHARES = (100, 80, 60, 40, 20, 0)  # per cent of the activation range
WORTH = 1e-4  # share of the step time below which two plans are as fast as one another


class Known:
    """Plans with what was predicted of each, which one plan is compared with. ``saving`` is the plan that saves all."""

    def __init__(self, saving: Mapping[str, Choice], plain: Prediction) -> None:
        self._saving, self._plain_seconds = saving, plain.step_seconds or 0.0
        self._reaches: dict[str, Reach] = {}
        self.keep(self.reach_of(saving, plain))

    @property
    def save_all(self) -> Reach:
        return self._reaches[plan_hash(self._saving)]

    @property
    def lean(self) -> Reach:
        return min(self._reaches.values(), key=lambda reach: (reach.peak_bytes, reach.step_seconds))

    def keep(self, reach: Reach) -> None:
        """Add a plan; the last prediction of a plan counts."""
        self._reaches[plan_hash(reach.choices)] = reach

    def reach_of(self, choices: Mapping[str, Choice], predicted: Prediction, peak: int | None = None) -> Reach:
        """A plan in numbers; ``peak``: bytes, where they are others than were predicted."""
        seconds, base = predicted.step_seconds or 0.0, self._plain_seconds
        return Reach(
            peak_bytes=predicted.peak_bytes if peak is None else peak,
            step_seconds=seconds,
            overhead=seconds / base - 1 if base > 0 else None,
            choices={**self._saving, **choices},
        )

    def reach(self, choices: Mapping[str, Choice]) -> Reach:
        """What one of the plans comes to."""
        return self._reaches[plan_hash(choices)]

    def at(self, budget_bytes: int, calls: int = CALLS) -> Reach | None:
        """The fastest plan within a budget; None where none fits. ``calls``: ghost runs that finding it may take."""
        fitting = [reach for reach in self._reaches.values() if reach.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda reach: (reach.step_seconds, reach.peak_bytes), default=None)

    def leaner(self, chosen: Reach) -> Reach | None:
        """The fastest plan that needs less than this one."""
        return self.at(chosen.peak_bytes - 1)

    def faster(self, chosen: Reach, budget_bytes: int) -> Reach | None:
        """The leanest plan that is faster than this one and does not fit where it does."""
        room = max(budget_bytes, chosen.peak_bytes)
        faster = [r for r in self._reaches.values() if r.peak_bytes > room and is_faster(r, chosen)]
        return min(faster, key=lambda reach: (reach.peak_bytes, reach.step_seconds), default=None)


def recorded(run: RunDirectory, profile: Profile, saving: Mapping[str, Choice]) -> Known:
    """The plans that a run's search tried or ghost-ran."""
    overhead = profile.op_times.device.overhead_bytes
    plain = Prediction(peak_bytes=profile.save_all_peak_bytes + overhead, step_seconds=profile.save_all_seconds)
    known = Known(saving, plain)
    outlook = run.outlook()
    for ghost in outlook.plans if outlook is not None else ():
        if ghost.predicted.step_seconds is not None:
            known.keep(known.reach_of(ghost.choices, ghost.predicted))
    for trial in run.trials():
        refuted = trial.state in ("failed", "out_of_memory") and trial.plan_hash != plan_hash(saving)
        if refuted:  # by real steps
            known._reaches.pop(trial.plan_hash, None)
        elif trial.predicted is not None and trial.predicted.step_seconds is not None:
            known.keep(known.reach_of(trial.choices, trial.predicted))
    return known


class Answers(Known):
    """Plans for any budget, by the solver and ghost runs; what one question taught helps the next."""

    def __init__(self, profiled: CostModel, kinds: tuple[str, ...]) -> None:
        self.profiled, predictor = profiled, profiled.predictor
        self.overhead = predictor.device.overhead_bytes
        self._remembered: dict[tuple[Choice, ...], Checked] = {}
        # shares of the link's time for copies that hide behind compute, as a search tries them
        shares = (1.0, 0.0) if predictor.device.copy_queues else (0.0,)
        self._offsets: dict[float, Offsets] = {share: {} for share in shares}
        known = known_plans([u.name for u in profiled.blocks], kinds)
        super().__init__(known[NONE], predictor.predict(known[NONE]))
        found = refine(profiled.problem(0), profiled.check, max_calls=CALLS, remembered=self._remembered)
        for choices in (profiled.plan(found.choices), *known.values()):
            self.keep(self.reach(choices))

    def reach(self, choices: Mapping[str, Choice], budget_bytes: int | None = None) -> Reach:
        """What a plan comes to, where its allocator is kept to ``budget_bytes`` (default: to the plan's that is
        explained)."""
        predictor = self.profiled.predictor
        predicted, peak = predictor.predict(choices), None
        if budget_bytes is not None and predicted.peak_bytes > budget_bytes and predictor.needs.caches:
            peak = predictor.needs.within(budget_bytes)(predictor.graph(choices))
        return self.reach_of(choices, predicted, peak)

    def at(self, budget_bytes: int, calls: int = CALLS) -> Reach | None:
        saving_is_best = all(o.seconds >= 0 for unit in self.profiled.problem(0).units for o in unit.options)
        if self.save_all.peak_bytes > budget_bytes or not saving_is_best:
            for share in self._offsets:
                if (found := self._refined(budget_bytes, calls, share)) is not None:
                    self.keep(found)
        return super().at(budget_bytes)

    def _refined(self, budget_bytes: int, calls: int, hidden: float) -> Reach | None:
        """The fastest plan by ghost runs, with copies that hide for that share of the link's time."""
        tensor_bytes = budget_bytes - self.overhead
        for _ in range(FRAGMENTED):
            found = refine_segmented(
                self.profiled.problem(tensor_bytes, hidden=hidden),
                self.profiled.check,
                self.profiled.segments,
                max_calls=calls,
                offsets=self._offsets[hidden],
                remembered=self._remembered,
            )
            self._offsets[hidden] = found.offsets
            if not found.feasible:
                break
            reach = self.reach(self.profiled.plan(found.choices), budget_bytes)
            if reach.peak_bytes <= budget_bytes:
                return reach
            tensor_bytes -= reach.peak_bytes - budget_bytes  # what an allocator kept to this budget cannot give back
        return None

    def leaner(self, chosen: Reach) -> Reach | None:
        least = self._least(chosen.choices)
        found = self.at(least - 1) if least > self._least(self.lean.choices) else None
        return found if found is not None and found.peak_bytes < chosen.peak_bytes else None

    def _least(self, choices: Mapping[str, Choice]) -> int:
        """Bytes that a plan needs, without what a caching allocator holds and could give back."""
        return self.profiled.check(choices).peak_bytes + self.overhead


def is_faster(one: Reach, other: Reach) -> bool:
    """Whether a plan is faster than another by more than the precision of the times of ops."""
    return one.step_seconds < other.step_seconds - WORTH * other.step_seconds


def why(answers: Known, choices: Mapping[str, Choice], budget_bytes: int | None) -> Why:
    """A plan among its neighbours. ``choices`` need not be the solver's, nor within the budget."""
    chosen = answers.reach(choices)
    room = chosen.peak_bytes if budget_bytes is None else max(budget_bytes, chosen.peak_bytes)
    best = answers.at(room)
    return Why(
        chosen=chosen,
        best=best if best is not None and is_faster(best, chosen) else None,
        leaner=answers.leaner(chosen),
        faster=answers.faster(chosen, room),
    )


def budget_steps(answers: Known, budget: ResolvedBudget | None) -> tuple[BudgetStep, ...]:
    """What budgets between saving everything and the leanest plan buy, and the one asked for, most bytes first."""
    high, low = answers.save_all.peak_bytes, answers.lean.peak_bytes
    asked = {low + (high - low) * share // 100: f"{share}%act" for share in SHARES}
    budget_bytes = None if budget is None else budget.bytes
    if budget is not None:
        asked = {s: label for s, label in asked.items() if s != budget_bytes and label != budget.words}
        asked[budget.bytes] = budget.words
    steps: list[BudgetStep] = []
    seen: set[str] = set()
    for size in sorted(asked):
        best = answers.at(size, TABLE_CALLS)  # what fits less is known by now, too
        ours, key = size == budget_bytes, plan_hash(best.choices) if best else format_binary(size)
        if ours:  # a budget that buys the very plan of another one is left out, the one asked for never
            steps = [s for s in steps if s.reach is None or best is None or s.reach.choices != best.choices]
        if ours or key not in seen:
            steps.append(BudgetStep(budget_bytes=size, label=asked[size], reach=best, ours=ours))
        seen.add(key)
    return tuple(reversed(steps))
