"""Candidates for compiled steps as a few numbers: some layers at the front do one thing, those behind them another.

What a layer keeps at the front of the model is held longest, so that is where the leaner choice belongs. ``Split`` is a
plan in three numbers; what splits cost that were not measured is read off the line between two that were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from autockpt.errors import AutockptError, InfeasibleError, MeasurementError
from autockpt.schema import RECOMPUTE, SAVE, Choice, CompileMode, ResolvedBudget, Trial
from autockpt.schema.choices import CompileBudget
from autockpt.schema.known import ALL, EVERY_2, NONE, known_plans
from autockpt.schema.space import Knob
from autockpt.tuning.infeasible import nothing_compiled_fits, out_of_memory
from autockpt.tuning.proposers.base import Plans, Proposer
from autockpt.tuning.proposers.sampler import Study, sampler_for
from autockpt.tuning.question import Question
from autockpt.tuning.targets.compiled_steps import CompiledSteps
from autockpt.tuning.trials import Candidate, Parameters, Trials

GRID = 0.05
"""Fractions are multiples of this: each is compiled anew, and finer ones seldom save other tensors."""
RUNS_AGAIN, SAVES = 0.0, 1.0
FRACTIONS = (0.8, 0.6, 0.4, 0.2)
"""Budgets that are measured for all layers alike before anything else."""
LONGER = (
    "Allow more --timeout or --trials; what was compiled and measured is kept, and the same command goes on from it."
)

EagerPlans = Callable[[float], Plans]  # the budget's place between the eager peaks, from 0 to 1 -> plans that fit


@dataclass(frozen=True, order=True)
class Split:
    """The first ``count`` layers keep ``lean`` of what the compiler would save, the others ``rich``.

    0 stands for recompute, 1 for save, between them lie shares of the compiler's memory budget.
    """

    lean: float
    rich: float
    count: int

    @classmethod
    def of(cls, lean: float, rich: float, count: int, layers: int) -> Split:
        """The one way to write this plan."""
        lean, rich = on_grid(lean), on_grid(rich)
        if count <= 0 or lean == rich:
            return cls(rich, rich, 0)
        return cls(lean, lean, 0) if count >= layers else cls(lean, rich, count)

    def choices(self, layers: Sequence[str]) -> dict[str, Choice]:
        """The plan. As one graph has one budget, with compile: model ``lean`` is 0 or equals ``rich``."""
        return {name: option(self.lean if i < self.count else self.rich) for i, name in enumerate(layers)}

    @property
    def parameters(self) -> Parameters:
        return {"lean": self.lean, "rich": self.rich, "count": self.count}

    def __str__(self) -> str:
        rest = named(self.rich)
        return f"first {self.count} {named(self.lean)}, then {rest}" if self.count else rest


@dataclass(frozen=True)
class Cost:
    """What a plan's measured step takes."""

    peak_bytes: int
    seconds: float


Known = Mapping[Split, Cost]


def on_grid(fraction: float) -> float:
    return round(round(min(max(fraction, 0.0), 1.0) / GRID) * GRID, 4)


def option(fraction: float) -> Choice:
    """The choice that keeps this share."""
    if fraction <= RUNS_AGAIN:
        return RECOMPUTE
    return SAVE if fraction >= SAVES else CompileBudget(fraction=fraction)


def named(fraction: float) -> str:
    """The choice that keeps this share, in words."""
    choice = option(fraction)
    return f"budget {fraction:g}" if isinstance(choice, CompileBudget) else choice.kind


def fraction(choice: Choice) -> float | None:
    """The share that a choice keeps; None for one that is not about shares."""
    if isinstance(choice, CompileBudget):
        return choice.fraction
    return {"save": SAVES, "recompute": RUNS_AGAIN}.get(choice.kind)


def sampled(mode: CompileMode) -> dict[str, Knob]:
    """What the sampler varies: the share of layers at the front, and what they and the others keep."""
    knobs = {"rich": Knob(low=0.05, high=1.0), "front": Knob(low=0.0, high=1.0)}
    if mode == "layers":
        knobs["lean"] = Knob(low=0.0, high=1.0)
    return knobs


def from_knobs(
    parameters: Mapping[str, float | int | str], mode: CompileMode, layers: int, *, shares: bool = True
) -> Split:
    """A sampler's point as a plan: ``front`` is a share of the layers, ``rich`` and ``lean`` are fractions.

    Without ``shares`` (budgets are refused) each fraction is taken for the nearer of recompute and save.
    """
    lean = float(parameters["lean"]) if mode == "layers" else RUNS_AGAIN
    rich, count = float(parameters["rich"]), round(float(parameters["front"]) * layers)
    if not shares:
        lean, rich = float(round(lean)), float(round(rich))
    if lean > rich and count > 0:  # the leaner of the two comes first
        lean, rich = rich, lean
    return Split.of(lean, rich, count, layers)


def to_knobs(split: Split, mode: CompileMode, layers: int) -> Parameters:
    """A plan as a sampler's point."""
    point: Parameters = {"rich": split.rich, "front": split.count / layers}
    return point | ({"lean": split.lean} if mode == "layers" else {})


def estimate(known: Known, split: Split, layers: int) -> Cost | None:
    """What the plan should cost by the nearest measured ones with the same two choices; None where these are not known.

    Linear between them, which whole layers are about. Never beyond them.
    """
    line = {
        count: cost
        for count in range(layers + 1)
        if (cost := known.get(Split.of(split.lean, split.rich, count, layers))) is not None
    }
    below = max((count for count in line if count <= split.count), default=None)
    above = min((count for count in line if count >= split.count), default=None)
    if below is None or above is None:
        return None
    share = (split.count - below) / (above - below) if above > below else 0.0
    first, last = line[below], line[above]
    peak = first.peak_bytes + share * (last.peak_bytes - first.peak_bytes)
    return Cost(round(peak), first.seconds + share * (last.seconds - first.seconds))


def proposals(known: Known, budget_bytes: int, mode: CompileMode, layers: int) -> list[Split]:
    """Plans that were not measured, should fit and be faster than the best measured one that does; fastest first.

    Of every two fractions that were measured for all layers alike, the one with the fewest lean layers that should fit.
    """
    uniform = sorted({split.rich for split in known if split.count == 0})
    best = min((cost.seconds for cost in known.values() if cost.peak_bytes <= budget_bytes), default=float("inf"))
    found: dict[Split, float] = {}
    for lean in uniform if mode == "layers" else [f for f in uniform if f == RUNS_AGAIN]:
        for rich in (f for f in uniform if f > lean):
            for count in range(1, layers):
                split = Split(lean, rich, count)
                cost = estimate(known, split, layers)
                if cost is not None and cost.peak_bytes <= budget_bytes:
                    if split not in known and cost.seconds < best:
                        found[split] = cost.seconds
                    break
    return sorted(found, key=lambda split: (found[split], split))


@dataclass(eq=False)
class SplitProposer(Proposer):
    """Well-known plans, uniform budgets, the eager solver's plan, then interleaved what should be best by all that was
    measured, and what the sampler wants to know.

    Every plan is measured. Nothing is predicted: ghost runs see eager ops, neither what a compiler fuses nor what its
    partitioner saves. ``layers`` are names of units in order, ``room`` the device's bytes, ``name`` the study's.
    """

    question: Question
    layers: Sequence[str]
    target: CompiledSteps
    trials: Trials
    storage: str | None
    _: KW_ONLY
    room: int
    eager: EagerPlans
    name: str
    notes: list[str] = field(default_factory=list)
    budget: ResolvedBudget | None = None
    sampler_turn: bool = False

    def __post_init__(self) -> None:
        self.mode: CompileMode = self.target.mode
        self.kinds = self.question.space.choices
        self.known = known_plans(self.layers, self.kinds)
        if self.mode == "model":  # where every plan is compiled anew, one that is seldom good is not worth it
            self.known.pop(EVERY_2, None)

    def begin(self) -> None:
        seed, name = self.question.seed, self.name
        self.study = Study(
            "knobs", sampler_for("layers", seed), sampled(self.mode), {}, name=name, storage=self.storage
        )
        self.target.begin(self.trials)

    @property
    def shares(self) -> bool:
        """Whether layers may keep a share of what the compiler would save."""
        return RECOMPUTE.kind in self.kinds and not self.target.refuses_budgets

    @property
    def most_baselines(self) -> int:
        return len(self.known) + len(FRACTIONS)

    def baselines(self, used_up: Callable[[], bool]) -> Iterator[Candidate]:
        """The well-known plans, then the same budget for all layers."""
        uniform = {f"budget {f:g}": Split(f, f, 0).choices(self.layers) for f in FRACTIONS} if self.shares else {}
        for name, choices in {**self.known, **uniform}.items():
            if name in uniform and not self.shares:
                return
            if self.trials.find(choices) is not None or not used_up():
                yield Candidate(dict(choices), name)
            if self.trials.scored or used_up():
                if name not in uniform or self.shares:
                    self.known[name] = dict(choices)
            elif not self._memory_ran_out:
                raise self._failure("")  # the rest would fail alike

    # -- the budget ---------------------------------------------------------------------------------------------------

    def resolve(self, stopped: str) -> int:
        if self.smallest_peak == 0:
            raise self._failure(stopped)
        if not self.knows_the_budget:
            raise MeasurementError(
                "the budget is a share of what activations take, which is not known before recomputing everything was "
                f"measured: {stopped}",
                remedy=LONGER,
            )
        none = self.trials.find(self.known[NONE])
        top = none.measured.peak_bytes if none is not None and none.measured is not None else self.room
        self.budget = self.question.budget.resolved(top, self._leanest, self.room, self.target.device_kind)
        return self.budget.bytes

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
    def knows_the_budget(self) -> bool:
        """Not where it is a share of a range whose lean end was not tried yet."""
        if ALL not in self.known or self.trials.find(self.known[ALL]) is not None:
            return True
        asked, least = self.question.budget, self.smallest_peak
        return asked.resolve(least, 0, self.room) == asked.resolve(least, least, self.room)

    @property
    def _place(self) -> float:
        """Where the budget lies between the leanest plan and saving everything, both compiled."""
        none = self.trials.find(self.known[NONE])
        assert self.budget is not None
        if none is None or none.measured is None or none.measured.peak_bytes <= self._leanest:
            return 1.0
        return (self.budget.bytes - self._leanest) / (none.measured.peak_bytes - self._leanest)

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
        assert self.budget is not None
        measured = sum(t.score is not None or t.state == "out_of_memory" for t in self.trials.all)
        return nothing_compiled_fits(self.budget, measured, self.smallest_peak)

    # -- candidates ---------------------------------------------------------------------------------------------------

    def first(self, used_up: Callable[[], bool]) -> Iterator[Candidate]:
        """Plans from elsewhere, and the eager solver's."""
        if not used_up():
            plans = {**self.question.seeds, **self.eager(self._place)}
            yield from (Candidate(dict(choices), name, "seed") for name, choices in plans.items())

    def propose(self) -> Candidate:
        """Every second time the sampler's own, else what should be best."""
        assert self.budget is not None
        count = len(self.layers)
        ideas = [] if self.sampler_turn else proposals(self._costs(), self.budget.bytes, self.mode, count)
        if ideas:
            self.study.enqueue([to_knobs(ideas[0], self.mode, count)])
        self.sampler_turn = not self.sampler_turn
        number, parameters = self.study.ask()
        split = from_knobs(parameters, self.mode, count, shares=self.shares)
        choices = split.choices(self.layers)
        allowed = all(c.kind in self.kinds or (self.shares and c.kind == "compile_budget") for c in choices.values())
        encoding = "proposed" if ideas else "knobs"
        return Candidate(choices, str(split), encoding, split.parameters, allowed=allowed, number=number)

    def tell(self, candidate: Candidate, trial: Trial | None, fresh: bool) -> None:
        if trial is None or trial.measured is None or self.budget is None:
            self.study.fail(candidate.number)
            return
        violation = trial.measured.peak_bytes / self.budget.bytes - 1
        self.study.tell(candidate.number, trial.measured.step_seconds, violation, trial)

    def compared(self) -> Sequence[Trial]:
        """Saving everything, and the fastest of the well-known ones that fits."""
        tried = [trial for choices in self.known.values() if (trial := self.trials.find(choices)) is not None]
        none = [trial for trial in tried if trial.measured is not None and trial.name == NONE]
        others = (t for t in tried if t.feasible is not False and t not in none)  # None: not known yet
        return none + sorted(others, key=lambda t: t.score_seconds)[:1]

    def _costs(self) -> dict[Split, Cost]:
        """All splits that were measured."""
        costs: dict[Split, Cost] = {}
        for trial in self.trials.scored:
            split = self._as_split(trial.choices)
            if split is not None and trial.measured is not None:
                costs[split] = Cost(trial.measured.peak_bytes, trial.measured.step_seconds)
        return costs

    def _as_split(self, choices: Mapping[str, Choice]) -> Split | None:
        """The split that a plan is, if it is one."""
        values = [fraction(choices.get(name, SAVE)) for name in self.layers]
        count = next((i for i, v in enumerate(values) if v != values[0]), 0)
        if None in values or any(v != values[-1] for v in values[count:]):
            return None
        return Split.of(values[0] or 0.0, values[-1] or 0.0, count, len(self.layers))
