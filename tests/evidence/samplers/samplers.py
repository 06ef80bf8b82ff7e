"""The table of samplers: what random search, TPE, NSGA-II and a Gaussian process find in either encoding. Simulated.

32 equal transformer blocks, four choices each, 30 % of the activation range, 1 % noise, op times 10 % wrong.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler

from autockpt.schema import Choice, Problem, SearchSpace, Trial, from_label, label, parse_choice
from autockpt.schema.known import known_plans
from autockpt.shipped import load_space
from autockpt.solvers import Checked, exact, refine
from autockpt.tuning.proposers.sampler import Study, sampler_for
from autockpt.tuning.proposers.solver import from_knobs, from_layers, neutral
from autockpt.tuning.refit import fit
from autockpt.tuning.targets.base import Terms
from autockpt.tuning.trials import Candidate, Parameters, Score, Trials
from tests.evidence.samplers.device import MadeUpDevice
from tests.evidence.samplers.engine import Question, question
from tests.evidence.samplers.family import instance

KINDS = ("save", "recompute", "keep_attention", "offload")
UNITS, SHARE, NOISE = 32, 0.3, 0.01
REFITS = (1, 3, 6)  # as in the engine
SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    "gp": partial(sampler_for, "knobs"),
    "tpe": partial(sampler_for, "layers"),
    "random": RandomSampler,
    "nsga2": lambda seed: NSGAIISampler(seed=seed, population_size=12),  # Optuna's 50 are more than a search has trials
}


@dataclass(frozen=True)
class Method:
    """One row. ``trials``: the most it is given; a Gaussian process over 32 categoricals takes seconds a trial."""

    name: str
    encoding: str
    sampler: str
    seeded: bool = False
    repaired: bool = False
    refitted: bool = False
    trials: int = 100


LAYERS = [Method(f"one categorical per layer, {s}", "layers", s) for s in ("random", "tpe", "nsga2")]
KNOBS = [
    Method(f"solver knobs, {s}, enqueued and refitted (space `knobs`)", "knobs", s, seeded=True, refitted=True)
    for s in ("gp", "tpe", "nsga2", "random")
]
SEEDED = [Method("per layer, tpe, solver plans enqueued", "layers", "tpe", seeded=True)]
SEEDED += [
    Method(f"per layer + repair to budget, {s}, enqueued (space `layers`)", "layers", s, seeded=True, repaired=True)
    for s in ("tpe", "nsga2", "random")
]
COLD = [Method(f"solver knobs, {s}, cold", "knobs", s, trials=50) for s in ("gp", "tpe", "nsga2", "random")]
COLD += [Method("one categorical per layer, gp", "layers", "gp", trials=20)]
METHODS = (*LAYERS, *KNOBS, *SEEDED, *COLD)


class Run:
    """One study of one method: asks, judges by ghost run, measures what fits and is new, tells."""

    def __init__(self, q: Question, method: Method, seed: int) -> None:
        self.q, self.method, self.profiled = q, method, q.beliefs[seed]
        space = load_space(method.encoding).restricted(KINDS)
        self.space: SearchSpace = space
        self.device = MadeUpDevice(q.truth, noise=NOISE, seed=seed)
        self.tried = Trials(None)
        self.tried.budget_bytes = q.budget
        self.checks: dict[tuple[Choice, ...], Checked] = {}
        self.unpriced = self.profiled.problem(0)
        menus = {unit.name: [option.choice for option in unit.options] for unit in self.unpriced.units}
        sampler = SAMPLERS[method.sampler](seed)
        self.study = Study(space.encoding, sampler, space.knobs, menus, name="search", storage=None)
        self.curve: list[Trial | None] = []

    def play(self) -> list[float | None]:
        """The true gap of the best measured plan after each trial; None where nothing feasible was found yet."""
        if self.method.seeded:
            self.study.enqueue(self._seeds())
        fresh = 0
        for _ in range(self.method.trials):
            number, parameters = self.study.ask()
            choices = self._choices(parameters)
            trial = self.tried.find(choices)
            if trial is None:
                fresh += 1
                trial = self._measured(choices, parameters)
                if self.method.refitted and fresh in REFITS:
                    self.study.enqueue(self._seeds())
            self._tell(number, trial)
            self.curve.append(self.tried.best)
        return [None if best is None else self._gap(best.choices) for best in self.curve]

    def _gap(self, choices: Mapping[str, Choice]) -> float:
        return self.q.truth.of(choices)[0] / self.q.reference.seconds - 1

    def _choices(self, parameters: Parameters) -> dict[str, Choice]:
        if self.space.encoding == "knobs":
            return self._solved(parameters)
        if self.method.repaired:
            problem = self.profiled.problem(self.q.budget)
            return from_layers(parameters, problem, self.profiled.check)[0]
        return {name: from_label(str(text)) for name, text in parameters.items()}

    def _solved(self, parameters: Parameters) -> dict[str, Choice]:
        scale = fit(self.unpriced, self.tried.scored).scale if self.method.refitted else {}
        solve = partial(refine, check=self.profiled.check, max_calls=Terms().checks, remembered=self.checks)
        return from_knobs(parameters, self.q.budget, scale, self._problem, solve)[0]

    def _problem(self, prices: Mapping[str, float], free: int, hidden: float = 0.0) -> Problem:
        return self.profiled.problem(self.q.budget, prices, free, hidden=hidden)

    def _seeds(self) -> list[Parameters]:
        if self.space.encoding == "knobs":
            return [neutral(self.space, margin) for margin in self.space.margins]
        solved = [self._solved({"margin": margin}) for margin in self.space.margins]
        plans = [*known_plans(self.q.instance.units, KINDS).values(), *solved]
        return [{name: label(choice) for name, choice in plan.items()} for plan in plans]

    def _measured(self, choices: dict[str, Choice], parameters: Parameters) -> Trial:
        predicted = self.profiled.predictor.predict(choices)
        score = Score("predicted_over")
        if predicted.peak_bytes <= self.q.budget:
            score = Score("measured", self.device.measure(choices))
        candidate = Candidate(choices, "", self.space.encoding, parameters, predicted)
        return self.tried.write(candidate, score, elapsed=0.0)

    def _tell(self, number: int, trial: Trial) -> None:
        said = trial.measured or trial.predicted
        assert said is not None and said.step_seconds is not None
        violation = said.peak_bytes / self.q.budget - 1
        self.study.tell(number, said.step_seconds, violation, trial)


def rows(seeds: int, counts: tuple[int, ...] = (20, 50, 100)) -> Iterator[str]:
    """Lines of the table, as they become known."""
    heads = [f"{name} after {' / '.join(map(str, counts))} trials" for name in ("ADD", "SIM")]
    yield "| method | " + " | ".join(heads) + " |"
    yield "|---|---|---|"
    questions = [question(instance(1, UNITS, 1, queues=queues, share=SHARE), seeds, KINDS) for queues in (False, True)]
    for name, gap in (("best single choice for all layers", _best_single), ("exact solver alone", _solver_alone)):
        yield f"| {name} | " + " | ".join(gap(q) for q in questions) + " |"
    yield "| solver refined by ghost runs | " + " | ".join(_refined(q) for q in questions) + " |"
    for method in METHODS:
        cells = [_cell([Run(q, method, seed).play() for seed in range(seeds)], counts) for q in questions]
        yield f"| {method.name} | " + " | ".join(cells) + " |"


def _cell(curves: list[list[float | None]], counts: tuple[int, ...]) -> str:
    """Median gap in percent over the seeds that found anything; in brackets how many, where not all did."""
    said = []
    for count in counts:
        if count > len(curves[0]):
            said.append("–")
            continue
        found = [gap for curve in curves if (gap := curve[count - 1]) is not None]
        some = "" if len(found) == len(curves) else f" ({len(found)}/{len(curves)})"
        said.append((f"{100 * statistics.median(found):.2f}" if found else "none") + some)
    return " / ".join(said)


def _best_single(q: Question) -> str:
    fitting = []
    for kind in KINDS:
        seconds, peak = q.truth.of(dict.fromkeys(q.instance.units, parse_choice(kind)))
        if peak <= q.budget:
            fitting.append(seconds / q.reference.seconds - 1)
    return f"{100 * min(fitting):.2f}"


def _over_beliefs(q: Question, solve: Callable[[int], Mapping[str, Choice]]) -> str:
    gaps = []
    for seed in q.beliefs:
        seconds, peak = q.truth.of(solve(seed))
        gaps.append(seconds / q.reference.seconds - 1 if peak <= q.budget else np.inf)
    found = [g for g in gaps if np.isfinite(g)]
    some = "" if len(found) == len(gaps) else f" ({len(found)}/{len(gaps)})"
    return (f"{100 * statistics.median(found):.2f}" if found else "none") + some


def _solver_alone(q: Question) -> str:
    """The solver's plan by the believed prices; it may not fit, as nothing held it against its ghost run."""
    return _over_beliefs(q, lambda seed: exact(q.beliefs[seed].problem(q.budget)).choices)


def _refined(q: Question) -> str:
    def solve(seed: int) -> Mapping[str, Choice]:
        p = q.beliefs[seed]
        solve = partial(refine, check=p.check, max_calls=Terms().checks)
        return from_knobs({}, q.budget, {}, lambda prices, free: p.problem(q.budget, prices, free), solve)[0]

    return _over_beliefs(q, solve)
