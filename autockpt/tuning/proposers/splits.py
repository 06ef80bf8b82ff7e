"""Two-segment plans for compiled training: the first layers make one choice, those behind them another.

What a layer keeps at the front of the model is held longest, so the leaner choice belongs there. Costs of splits that
were not measured are interpolated linearly between two that were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from autockpt.errors import AutockptError, InfeasibleError, MeasurementError
from autockpt.schema import RECOMPUTE, SAVE, Choice, CompileMode, SearchRequest, label
from autockpt.schema.choices import CompileBudget, Selective
from autockpt.schema.known import ALL, EVERY_2, NONE, known_plans
from autockpt.tuning.infeasible import nothing_compiled_fits, out_of_memory
from autockpt.tuning.loop import Limits, Proposer
from autockpt.tuning.targets.compiled import Compiled
from autockpt.tuning.trials import Candidate, Parameters, Plans, Trials

FRACTIONS = (0.8, 0.6, 0.4, 0.2)
"""Budgets that are measured for all layers alike before anything else."""
LONGER = (
    "Allow more --timeout or --trials; what was compiled and measured is kept, and the same command goes on from it."
)

EagerPlans = Callable[[float], Plans]  # the budget's place between the eager peaks, from 0 to 1 -> plans that fit


@dataclass(frozen=True)
class Split:
    """The first ``count`` layers make the choice ``lean``, the others ``rich``; alike, they are no first ones."""

    lean: Choice
    rich: Choice
    count: int = 0

    @classmethod
    def of(cls, choices: Sequence[Choice]) -> Split | None:
        """The split that a plan is, by its layers' choices in order, if it is one."""
        lean, rich = choices[0], choices[-1]
        count = next((i for i, choice in enumerate(choices) if choice != lean), 0)
        return cls(lean, rich, count) if all(choice == rich for choice in choices[count:]) else None

    def choices(self, layers: Sequence[str]) -> dict[str, Choice]:
        """The plan."""
        return {name: self.lean if i < self.count else self.rich for i, name in enumerate(layers)}

    @property
    def parameters(self) -> Parameters:
        return {"lean": label(self.lean), "rich": label(self.rich), "count": self.count}

    def __str__(self) -> str:
        rest = named(self.rich)
        return f"first {self.count} {named(self.lean)}, then {rest}" if self.count else rest


@dataclass(frozen=True)
class Cost:
    """What a plan's measured step takes."""

    peak_bytes: int
    seconds: float


Known = Mapping[Split, Cost]


def named(choice: Choice) -> str:
    """A choice in words."""
    return f"budget {choice.fraction:g}" if isinstance(choice, CompileBudget) else choice.kind


def estimate(known: Known, lean: Choice, rich: Choice, count: int, layers: int) -> Cost | None:
    """What a split should cost by the nearest measured ones of the same two choices; None where these are not known.

    Linear between them, which whole layers are about. Never beyond them.
    """
    ends = {Split(rich, rich): 0, Split(lean, lean): layers}
    line = {
        ends.get(split, split.count): cost
        for split, cost in known.items()
        if split in ends or (split.lean, split.rich) == (lean, rich)
    }
    below = max((n for n in line if n <= count), default=None)
    above = min((n for n in line if n >= count), default=None)
    if below is None or above is None:
        return None
    share = (count - below) / (above - below) if above > below else 0.0
    first, last = line[below], line[above]
    peak = first.peak_bytes + share * (last.peak_bytes - first.peak_bytes)
    return Cost(round(peak), first.seconds + share * (last.seconds - first.seconds))


def proposals(known: Known, budget_bytes: int, mode: CompileMode, layers: int) -> list[Split]:
    """Plans that were not measured, should fit and be faster than the best measured one that does; fastest first.

    Of every two choices that were measured on all layers alike, the one with the fewest lean layers that should fit.
    One graph has one budget, so with ``mode`` "model" only the other layers may be on one.
    """
    uniform = {split.rich: cost.peak_bytes for split, cost in known.items() if split.count == 0}
    best = min((cost.seconds for cost in known.values() if cost.peak_bytes <= budget_bytes), default=float("inf"))
    found: dict[Split, float] = {}
    for lean in uniform:
        if mode == "model" and isinstance(lean, CompileBudget):
            continue
        for rich in (choice for choice in uniform if uniform[choice] > uniform[lean]):
            for count in range(1, layers):
                cost, split = estimate(known, lean, rich, count, layers), Split(lean, rich, count)
                if cost is not None and cost.peak_bytes <= budget_bytes:
                    if split not in known and cost.seconds < best:
                        found[split] = cost.seconds
                    break
    return sorted(found, key=lambda split: (found[split], str(split)))


@dataclass(eq=False)
class SplitProposer(Proposer):
    """Well-known plans, uniform budgets, the eager solver's plan, then what should be best by all that was
    measured, until nothing should be faster.

    Every plan is measured. Nothing is predicted: ghost runs see eager ops, neither what a compiler fuses nor what its
    partitioner saves. ``layers`` are names of units in order, ``room`` the device's bytes.
    """

    request: SearchRequest
    layers: Sequence[str]
    target: Compiled
    trials: Trials
    _: KW_ONLY
    room: int
    eager: EagerPlans
    seeds: Plans

    def __post_init__(self) -> None:
        self.mode: CompileMode = self.target.mode
        self.kinds = self.request.space.choices
        self.known = known_plans(self.layers, self.kinds)
        if self.mode == "model":  # where every plan is compiled anew, one that is seldom good is not worth it
            self.known.pop(EVERY_2, None)
        alike: list[Choice] = [Selective()] if Selective().kind in self.kinds else []
        alike += [CompileBudget(fraction=f) for f in FRACTIONS] if RECOMPUTE.kind in self.kinds else []
        self.known |= {named(choice): dict.fromkeys(self.layers, choice) for choice in alike}

    def begin(self) -> None:
        """Nothing is predicted, so nothing is known before the first step."""

    @property
    def shares(self) -> bool:
        """Whether layers may keep a share of what the compiler would save."""
        return RECOMPUTE.kind in self.kinds and not self.target.refuses_budgets

    def baselines(self, limits: Limits) -> Iterator[Candidate]:
        """The well-known plans, then the same budget for all layers, as long as the compiler takes budgets."""
        for name, choices in list(self.known.items()):
            uniform = name.startswith("budget ")
            if uniform and not self.shares:
                del self.known[name]
                continue
            if self.trials.find(choices) is not None or not limits.used_up():
                yield Candidate(choices, name)
            if not self.trials.scored and not limits.used_up() and not self._memory_ran_out:
                raise self._failure("")  # the rest would fail alike
            if uniform and not self.shares:
                del self.known[name]

    # -- the budget ---------------------------------------------------------------------------------------------------

    def resolve(self, stopped: str) -> None:
        if self.smallest_peak == 0:
            raise self._failure(stopped)
        if not self._knows_the_budget:
            raise MeasurementError(
                "the budget is a share of what activations take, which is not known before recomputing everything was "
                f"measured: {stopped}",
                remedy=LONGER,
            )
        none = self.trials.find(self.known[NONE])
        top = none.measured.peak_bytes if none is not None and none.measured is not None else self.room
        self.trials.judge(self.request.budget.resolved(top, self._leanest, self.room, self.target.device_kind))

    @property
    def smallest_peak(self) -> int:
        return min((t.measured.peak_bytes for t in self.trials.all if t.measured is not None), default=0)

    @property
    def _leanest(self) -> int:
        """Peak of recomputing everything, with which every run begins, so that all mean the same budget.

        The least peak there is where that does not run.
        """
        trial = self.trials.find(self.known.get(ALL, {}))
        return trial.measured.peak_bytes if trial is not None and trial.measured is not None else self.smallest_peak

    @property
    def _knows_the_budget(self) -> bool:
        """Not where it is a share of a range whose lean end was not tried yet."""
        if ALL not in self.known or self.trials.find(self.known[ALL]) is not None:
            return True
        asked, least = self.request.budget, self.smallest_peak
        return asked.resolve(least, 0, self.room) == asked.resolve(least, least, self.room)

    @property
    def _place(self) -> float:
        """Where the budget lies between the leanest plan and saving everything, both compiled."""
        none = self.trials.find(self.known[NONE])
        assert self.trials.budget_bytes is not None
        if none is None or none.measured is None or none.measured.peak_bytes <= self._leanest:
            return 1.0
        return (self.trials.budget_bytes - self._leanest) / (none.measured.peak_bytes - self._leanest)

    @property
    def _memory_ran_out(self) -> bool:
        return any(trial.state == "out_of_memory" for trial in self.trials.all)

    def _failure(self, stopped: str) -> AutockptError:
        """Why not one step could be measured."""
        said = [t for t in self.trials.all if t.message]
        if self._memory_ran_out:
            return out_of_memory("no compiled step runs", said[-1].message)
        if not said:
            return MeasurementError(f"no compiled step could be measured: {stopped}", remedy=LONGER)
        why = said[0].message
        return MeasurementError(f"no compiled step could be measured: {why}", remedy="Search without --compile.")

    def infeasible(self) -> InfeasibleError:
        assert self.trials.budget is not None
        measured = sum(t.score is not None or t.state == "out_of_memory" for t in self.trials.all)
        return nothing_compiled_fits(self.trials.budget, measured, self.smallest_peak)

    # -- candidates ---------------------------------------------------------------------------------------------------

    def candidates(self, limits: Limits) -> Iterator[Candidate]:
        """Plans from elsewhere and the eager solver's; then what should be best by all that was measured."""
        for name, choices in {} if limits.used_up() else {**self.seeds, **self.eager(self._place)}.items():
            if not limits.used_up():
                yield Candidate(dict(choices), name, "seed")
        assert self.trials.budget_bytes is not None
        while not limits.used_up():
            began = self.target.clock.elapsed
            ideas = proposals(self._costs(), self.trials.budget_bytes, self.mode, len(self.layers))
            plans = [Candidate(s.choices(self.layers), str(s), "proposed", s.parameters) for s in ideas]
            untried = [plan for plan in plans if self.trials.find(plan.choices) is None]
            if not untried:
                limits.over("the space offers no further plan within the budget")
                return
            yield untried[0]
            limits.took = self.target.clock.elapsed - began

    def _costs(self) -> dict[Split, Cost]:
        """All splits that were measured."""
        costs: dict[Split, Cost] = {}
        for trial in self.trials.scored:
            split = Split.of([trial.choices.get(name, SAVE) for name in self.layers])
            if split is not None and trial.measured is not None:
                costs[split] = Cost(trial.measured.peak_bytes, trial.measured.step_seconds)
        return costs
