"""Why this plan: its neighbours in bytes, what the bytes between them cost, and what other budgets buy."""

from __future__ import annotations

import math
from collections.abc import Mapping

from autockpt.analysis.subject import ExplainRequest
from autockpt.cost import CostModel
from autockpt.schema import Assignment, Choice, Prediction, Profile, ResolvedBudget, format_binary, plan_hash
from autockpt.schema.explanation import BudgetStep, Reach, Why
from autockpt.schema.known import NONE, known_plans
from autockpt.schema.runs import RunDirectory
from autockpt.solvers import Checked, refine, refine_segmented
from autockpt.solvers.refine import Offsets, solved

CALLS = 4  # ghost runs that one question may take
TABLE_CALLS = 2  # and one line of the table of budgets
FRAGMENTED = 2  # times that a budget is tried, less each time by what fragmentation takes
HALVINGS = 24
BEYOND = (0.0, 0.01, 0.05)  # shares of what is left that the model's next threshold may be too low by
SHARES = (100, 80, 60, 40, 20, 0)  # per cent of the activation range
WORTH = 1e-4  # share of the step time below which two plans are as fast as one another


class Answers:
    """Plans for any budget, by the solver and ghost runs; what one question taught helps the next."""

    def __init__(self, profiled: CostModel, kinds: tuple[str, ...]) -> None:
        self.profiled = profiled
        self.overhead = profiled.predictor.device.overhead_bytes
        self._remembered: dict[tuple[Choice, ...], Checked] = {}
        # shares of the link's time for copies that hide behind compute, as a search tries them, the likelier one first
        self._hidden = (1.0, 0.0) if profiled.predictor.device.copy_queues else (0.0,)
        self._offsets: dict[float, Offsets] = {share: {} for share in self._hidden}
        known = known_plans([u.name for u in profiled.blocks], kinds)
        self.save_all = self.reach(known[NONE])
        self.lean = self._leanest(known)

    def reach(self, choices: Mapping[str, Choice], budget_bytes: int | None = None) -> Reach:
        """What a plan comes to, where its allocator is kept to ``budget_bytes`` (default: to the plan's that is
        explained)."""
        predictor = self.profiled.predictor
        said = predictor.predict(choices)
        peak = said.peak_bytes
        if budget_bytes is not None and peak > budget_bytes and predictor.needs is not None:
            peak = predictor.needs.within(budget_bytes)(predictor.graph(choices))
        seconds, base = said.step_seconds or 0.0, self.profiled.profile.save_all_seconds
        return Reach(
            peak_bytes=peak,
            step_seconds=seconds,
            overhead=seconds / base - 1 if base > 0 else None,
            choices=dict(choices),
        )

    def at(self, budget_bytes: int, calls: int = CALLS) -> Reach | None:
        """The fastest plan within a budget; None where nothing fits."""
        if self.save_all.peak_bytes <= budget_bytes and not self._gains():
            return self.save_all
        best = None
        for hidden in self._hidden:
            if best is None or self._promised(budget_bytes, hidden) < best.step_seconds:
                found = self._refined(budget_bytes, calls, hidden)
                best = min((r for r in (best, found) if r is not None), key=lambda r: r.step_seconds, default=None)
        return best or (self.lean if self.lean.peak_bytes <= budget_bytes else None)

    def _promised(self, budget_bytes: int, hidden: float) -> float:
        """Step seconds of the fastest plan by the solver's own prices."""
        answer = self.model(budget_bytes, hidden)
        return self.profiled.profile.save_all_seconds + answer.seconds if answer.feasible else math.inf

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
        """The fastest plan that needs less than this one."""
        least = self.least(chosen.choices)
        if least <= self.least(self.lean.choices):
            return None
        found = self.at(least - 1)
        return found if found is not None and found.peak_bytes < chosen.peak_bytes else None

    def faster(self, chosen: Reach, budget_bytes: int) -> Reach | None:
        """The leanest plan that is faster than this one and does not fit where it does."""
        here = self.model(budget_bytes)
        threshold = self.next_threshold(budget_bytes, here.seconds) if here.feasible else None
        if threshold is None:
            return None
        for share in BEYOND:
            found = self.at(threshold + int(share * max(0, self.save_all.peak_bytes - threshold)))
            if found is None or found.peak_bytes <= chosen.peak_bytes:
                continue
            if is_faster(found, chosen):
                return found
        return None

    def least(self, choices: Mapping[str, Choice]) -> int:
        """Bytes that a plan needs, without what a caching allocator holds and could give back."""
        return self.profiled.check(choices).peak_bytes + self.overhead

    def _gains(self) -> bool:
        """Whether any choice is faster than saving, by the op times: noise may say so."""
        return any(option.seconds < 0 for unit in self.profiled.problem(0).units for option in unit.options)

    def _leanest(self, known: Mapping[str, Mapping[str, Choice]]) -> Reach:
        found = refine(self.profiled.problem(0), self.profiled.check, max_calls=CALLS, remembered=self._remembered)
        plans = [self.reach(choices) for choices in (self.profiled.plan(found.choices), *known.values())]
        return min(plans, key=lambda r: (r.peak_bytes, r.step_seconds))

    def next_threshold(self, above: int, seconds: float) -> int | None:
        """The smallest budget above ``above`` bytes for which the corrected model promises less than ``seconds``.

        ``seconds`` are those of the model, over saving everything.
        """
        low, high = above, self.save_all.peak_bytes
        worthwhile = WORTH * abs(self.profiled.profile.save_all_seconds)

        def promises(budget_bytes: int) -> bool:
            answer = self.model(budget_bytes)
            return answer.feasible and answer.seconds < seconds - worthwhile

        if high <= low or not promises(high):
            return None
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            low, high = (low, middle) if promises(middle) else (middle, high)
        return high

    def model(self, budget_bytes: int, hidden: float | None = None) -> Assignment:
        """The best plan by the problem's own numbers, corrected by what ghost runs showed."""
        hidden = self._hidden[0] if hidden is None else hidden
        problem = self.profiled.problem(budget_bytes - self.overhead, hidden=hidden)
        return solved(problem, self._offsets[hidden])


class Recorded:
    """The plans that a run's search tried or ghost-ran, with what was predicted of each; the same questions.

    ``saving`` is the plan that saves everything.
    """

    def __init__(self, run: RunDirectory, profile: Profile, saving: Mapping[str, Choice]) -> None:
        self._plain_seconds = profile.save_all_seconds
        self._saving = saving
        self._known: dict[str, Reach] = {}
        overhead = profile.op_times.device.overhead_bytes
        plain = Prediction(peak_bytes=profile.save_all_peak_bytes + overhead, step_seconds=profile.save_all_seconds)
        self.add(saving, plain)
        outlook = run.outlook()
        for ghost in outlook.plans if outlook is not None else ():
            self.add(ghost.choices, ghost.predicted)
        for trial in run.trials():
            self.add(trial.choices, trial.predicted)
            if trial.state in ("failed", "out_of_memory") and trial.plan_hash != plan_hash(saving):
                self._known.pop(trial.plan_hash, None)  # real steps refuted its prediction

    @property
    def save_all(self) -> Reach:
        return self._known[plan_hash(self._saving)]

    @property
    def lean(self) -> Reach:
        return min(self._known.values(), key=lambda reach: (reach.peak_bytes, reach.step_seconds))

    def add(self, choices: Mapping[str, Choice], predicted: Prediction | None) -> None:
        """Keep what was predicted of a plan; the last prediction of a plan counts."""
        if predicted is None or predicted.step_seconds is None:
            return
        base = self._plain_seconds
        self._known[plan_hash(choices)] = Reach(
            peak_bytes=predicted.peak_bytes,
            step_seconds=predicted.step_seconds,
            overhead=predicted.step_seconds / base - 1 if base > 0 else None,
            choices={**self._saving, **choices},
        )

    def reach(self, choices: Mapping[str, Choice], budget_bytes: int | None = None) -> Reach:
        return self._known[plan_hash(choices)]

    def at(self, budget_bytes: int, calls: int = 0) -> Reach | None:
        """The fastest known plan within a budget; None where none fits."""
        fitting = [reach for reach in self._known.values() if reach.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda reach: (reach.step_seconds, reach.peak_bytes), default=None)

    def leaner(self, chosen: Reach) -> Reach | None:
        return self.at(chosen.peak_bytes - 1)

    def faster(self, chosen: Reach, budget_bytes: int) -> Reach | None:
        known = [r for r in self._known.values() if r.peak_bytes > max(budget_bytes, chosen.peak_bytes)]
        faster = [r for r in known if is_faster(r, chosen)]
        return min(faster, key=lambda reach: (reach.peak_bytes, reach.step_seconds), default=None)


Neighbours = Answers | Recorded
"""The plans that a plan is compared with."""


def resolved(question: ExplainRequest, answers: Answers) -> ResolvedBudget | None:
    """The budget in bytes: the one asked for, else the plan's own."""
    device = answers.profiled.predictor.device
    if question.budget is None:
        return question.plan.budget if question.plan is not None else None
    capacity = device.capacity_bytes - answers.profiled.used_by_others
    return question.budget.resolved(answers.save_all.peak_bytes, answers.lean.peak_bytes, capacity, device.kind)


def is_faster(one: Reach, other: Reach) -> bool:
    """Whether a plan is faster than another by more than the precision of the times of ops."""
    return one.step_seconds < other.step_seconds - WORTH * other.step_seconds


def why(answers: Neighbours, choices: Mapping[str, Choice], budget_bytes: int | None) -> Why:
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


def budget_steps(
    answers: Neighbours, budget: ResolvedBudget | None, plan: Mapping[str, Choice] | None = None
) -> tuple[BudgetStep, ...]:
    """What budgets between saving everything and the leanest plan buy, and the one asked for, most bytes first.

    ``plan`` is one that a longer search may have found: where it fits, nothing slower is said to be the fastest.
    """
    high, low = answers.save_all.peak_bytes, answers.lean.peak_bytes
    asked = {low + (high - low) * share // 100: f"{share}%act" for share in SHARES}
    budget_bytes = None if budget is None else budget.bytes
    if budget is not None:
        asked = {s: label for s, label in asked.items() if s != budget_bytes and label != budget.words}
        asked[budget.bytes] = budget.words
    steps: list[BudgetStep] = []
    best: Reach | None = None
    seen: set[str] = set()
    for size in sorted(asked):
        found = answers.lean if size == low else answers.at(size, TABLE_CALLS)
        known = answers.reach(plan, size) if plan is not None else None
        if known is not None and known.peak_bytes > size:
            known = None
        # what fits less is not beaten by a slower plan: few ghost runs do not always find the best one
        best = min((r for r in (found, best, known) if r is not None), key=lambda r: r.step_seconds, default=None)
        ours, key = size == budget_bytes, plan_hash(best.choices) if best else format_binary(size)
        if ours:  # a budget that buys the very plan of another one is left out, the one asked for never
            steps = [s for s in steps if s.reach is None or best is None or s.reach.choices != best.choices]
        if ours or key not in seen:
            steps.append(BudgetStep(budget_bytes=size, label=asked[size], reach=best, ours=ours))
        seen.add(key)
    return tuple(reversed(steps))
