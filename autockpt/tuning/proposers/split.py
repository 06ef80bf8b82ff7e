"""Candidates for compiled steps, which nothing predicts: split plans of the choices that were measured so far.

What a layer keeps at the front of the model is held longest, so the leaner choice belongs there. What a layer costs is
read off the measured uniform plans. What that sum missed of a plan corrects all plans of the same two choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby, permutations

from autockpt.errors import AutockptError, InfeasibleError, MeasurementError
from autockpt.schema import RECOMPUTE, SAVE, Choice, Measurement, SearchRequest, Trial
from autockpt.schema.baselines import ALL, EVERY_2, NONE, baseline_plans
from autockpt.schema.choices import CompileBudget, Selective
from autockpt.schema.sizes import format_bytes
from autockpt.solvers import split_plans
from autockpt.solvers.problem import Option, Point, Problem, UnitOptions, peak_of
from autockpt.tuning.infeasible import SMALLER, out_of_memory
from autockpt.tuning.loop import Loop, Proposer
from autockpt.tuning.targets.compiled import Compiled
from autockpt.tuning.trials import Candidate, Plans, Trials

FRACTIONS = (0.8, 0.6, 0.4, 0.2)
"""Compile budgets that are measured on all layers."""
LONGER = (
    "Allow more --timeout or --trials; what was compiled and measured is kept, and the same command goes on from it."
)


def named(choice: Choice) -> str:
    """A choice as text."""
    return f"budget {choice.fraction:g}" if isinstance(choice, CompileBudget) else choice.kind


def proposals(
    layers: Sequence[str], tried: Sequence[Trial], budget_bytes: int, *, one_graph: bool = False
) -> list[dict[str, Choice]]:
    """Split plans that should fit and be faster than the best measured plan that fits, fastest first.

    For every two choices that were measured on all layers it is the fastest that should fit. A graph has a single
    compile budget, so with ``one_graph`` only one part of a plan may have one.
    """
    plans = [({name: t.choices.get(name, SAVE) for name in layers}, t.measured) for t in tried if t.measured]
    plans = [(choices, cost) for choices, cost in plans if len(list(groupby(choices.values()))) <= 2]
    uniform = {choices[layers[0]]: cost for choices, cost in plans if len(dict.fromkeys(choices.values())) == 1}
    base = min((cost.step_seconds for cost in uniform.values()), default=0.0)
    problem = _problem(layers, uniform, base)
    best = min((cost.step_seconds for _, cost in plans if cost.peak_bytes <= budget_bytes), default=float("inf"))
    found: list[tuple[float, dict[str, Choice]]] = []
    for lean, rich in permutations(uniform, 2):
        if uniform[lean].peak_bytes >= uniform[rich].peak_bytes or (one_graph and isinstance(lean, CompileBudget)):
            continue
        pair = dict.fromkeys((lean, rich)).keys()
        alike = [(c, cost.peak_bytes) for c, cost in plans if dict.fromkeys(c.values()).keys() == pair]
        missed = [peak_bytes - peak_of(problem, c) for c, peak_bytes in alike]
        asked = problem.model_copy(update={"budget_bytes": budget_bytes - max(missed, default=0)})
        for plan in split_plans(asked, lambda front, back, wanted=(lean, rich): (front, back) == wanted):
            if len(dict.fromkeys(plan.choices.values())) == 2 and base + plan.seconds < best:
                found.append((plan.seconds, plan.choices))
    return [choices for _, choices in sorted(found, key=lambda plan: plan[0])]


def _problem(layers: Sequence[str], uniform: Mapping[Choice, Measurement], base: float) -> Problem:
    """A planning problem in which every layer has an equal share of the costs of the measured ``uniform`` plans."""
    least = min((cost.peak_bytes for cost in uniform.values()), default=0)
    options = tuple(
        Option(
            choice=choice,
            seconds=(cost.step_seconds - base) / len(layers),
            kept=(cost.peak_bytes - least) // len(layers),
            forward=0,
            backward=0,
        )
        for choice, cost in uniform.items()
    )
    units = tuple(UnitOptions(name=name, options=options) for name in layers if options)
    return Problem(units=units, points=(Point(base=least, prefix=len(units)),), budget_bytes=0)


@dataclass(eq=False)
class SplitProposer(Proposer):
    """Proposes baselines, uniform compile budgets, then split plans until none should be faster.

    Every plan is measured, and costs are fitted to the measurements. ``layers`` are names of units in order, ``room``
    is the device's free memory in bytes.
    """

    request: SearchRequest
    layers: Sequence[str]
    target: Compiled
    trials: Trials
    _: KW_ONLY
    room: int
    seeds: Plans

    def __post_init__(self) -> None:
        kinds = self.request.space.choices
        self.baselines = baseline_plans(self.layers, kinds)
        if self.request.compile == "model":  # where every plan is compiled again, and this one is rarely good
            self.baselines.pop(EVERY_2, None)
        alike: list[Choice] = [Selective()] if Selective().kind in kinds else []
        alike += [CompileBudget(fraction=f) for f in FRACTIONS] if RECOMPUTE.kind in kinds else []
        self.baselines |= {named(choice): dict.fromkeys(self.layers, choice) for choice in alike}

    def baseline_candidates(self, loop: Loop) -> Iterator[Candidate]:
        """The baselines, then uniform compile budgets as long as the compiler accepts them."""
        for name, choices in list(self.baselines.items()):
            if name not in self.baselines:
                continue
            if self.trials.find(choices) is not None or not loop.used_up():
                yield Candidate(choices, name)
            if not self.trials.scored and not loop.used_up() and not self._memory_ran_out:
                raise self._failure("")  # the others would fail for the same reason
            if self.target.refuses_budgets:
                self.baselines = {name: plan for name, plan in self.baselines.items() if not name.startswith("budget ")}

    # -- the budget ---------------------------------------------------------------------------------------------------

    def resolve(self, stopped: str) -> bool:
        budget, lean = self.request.budget, self._trial(ALL)
        if self.smallest_peak == 0:
            raise self._failure(stopped)
        if budget.kind == "activation_share" and ALL in self.baselines and lean is None:
            raise MeasurementError(
                "the budget is a share of what activations take, which is not known before recomputing everything was "
                f"measured: {stopped}",
                remedy=LONGER,
            )
        # the leanest plan is recomputing everything, so that a relative budget means the same in every run
        none = self._trial(NONE)
        top = none.measured.peak_bytes if none is not None and none.measured is not None else self.room
        least = lean.measured.peak_bytes if lean is not None and lean.measured is not None else self.smallest_peak
        self.trials.judge(budget.resolved(top, least, self.room, self.target.measurer.environment.device.kind))
        return False

    def _trial(self, name: str) -> Trial | None:
        return self.trials.find(self.baselines[name]) if name in self.baselines else None

    @property
    def smallest_peak(self) -> int:
        return min((t.measured.peak_bytes for t in self.trials.all if t.measured is not None), default=0)

    @property
    def _memory_ran_out(self) -> bool:
        return any(trial.state == "out_of_memory" for trial in self.trials.all)

    def _failure(self, stopped: str) -> AutockptError:
        """The error where no step at all could be measured."""
        whys = [trial.message for trial in self.trials.all if trial.message]
        if self._memory_ran_out:
            return out_of_memory("no compiled step runs", whys[-1])
        remedy = "Search without --compile." if whys else LONGER
        return MeasurementError(f"no compiled step could be measured: {[*whys, stopped][0]}", remedy=remedy)

    def infeasible(self) -> InfeasibleError:
        assert self.trials.budget is not None
        measured = sum(t.score is not None or t.state == "out_of_memory" for t in self.trials.all)
        return InfeasibleError(
            f"no compiled step fits {format_bytes(self.trials.budget.bytes)}: the leanest of {measured} measured plans "
            f"needs {format_bytes(self.smallest_peak)}",
            remedy=f"Raise the budget, {SMALLER}, or search without --compile, where layers may be offloaded.",
            smallest_peak=self.smallest_peak,
        )

    # -- candidates ---------------------------------------------------------------------------------------------------

    def candidates(self, loop: Loop) -> Iterator[Candidate]:
        """The plans to start from; then split plans by the costs measured so far."""
        for name, choices in self.seeds.items():
            if not loop.used_up():
                yield Candidate(dict(choices), name, "seed")
        assert self.trials.budget_bytes is not None
        while not loop.used_up():
            one_graph = self.request.compile == "model"
            plans = proposals(self.layers, self.trials.scored, self.trials.budget_bytes, one_graph=one_graph)
            untried = [plan for plan in plans if self.trials.find(plan) is None]
            if not untried:
                loop.stop_if("the space offers no further plan within the budget")
                return
            front, *others = untried[0].values()
            name = f"first {1 + others.count(front)} {named(front)}, then {named(others[-1])}"
            yield Candidate(untried[0], name, "proposed")
