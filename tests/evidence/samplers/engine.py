"""How far from the optimum the plan is that autockpt's own search names, after 5, 10 and 20 trials. Simulated."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autockpt.cost import CostModel
from autockpt.schema import Budget, SearchRequest, SearchSpace, Silence
from autockpt.schema.choices import searched_kinds
from autockpt.shipped import load_space
from autockpt.tuning.loop import Loop, SearchResult
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.question import Clock
from autockpt.tuning.targets.real_steps import RealSteps
from autockpt.tuning.trials import Trials
from tests.evidence.samplers.device import MadeUpDevice, Truth, believed, menu_of
from tests.evidence.samplers.family import Instance, instance
from tests.evidence.samplers.reference import Costs, Reference, optimum, scheduled

TRIALS = (5, 10, 20)
NOISES = (0.01, 0.03)
# seed, units, kinds, share of the way from the leanest plan to saving everything, kinds in stages
ADDS_UP = ((2, 32, 3, 0.5, False), (5, 64, 1, 0.5, False), (4, 64, 3, 0.3, True), (8, 200, 2, 0.3, False))
QUEUES = ((2, 32, 3, 0.5, False), (3, 48, 2, 0.15, True), (6, 96, 2, 0.3, False), (8, 200, 2, 0.3, False))


@dataclass(frozen=True)
class Question:
    """A member of the family under a budget (bytes): beliefs by seed, and the truth that a search cannot see."""

    instance: Instance
    truth: Truth
    beliefs: dict[int, CostModel]
    budget: int
    reference: Reference

    def gap(self, found: SearchResult) -> float:
        """How much longer the named plan's true step takes than the optimum's; infinite where none was named."""
        if found.best is None:
            return float("inf")
        seconds, peak = self.truth.of(found.best.choices)
        assert peak <= self.budget and seconds >= self.reference.bound
        return seconds / self.reference.seconds - 1


def question(made: Instance, seeds: int, kinds: tuple[str, ...] = ()) -> Question:
    """Beliefs, budget and optimum of an instance; the optimum may use every choice that any of the beliefs offers."""
    kinds = kinds or searched_kinds()
    truly = believed(made, kinds, seed=0, error=0.0)
    beliefs = {seed: believed(made, kinds, seed=100 + seed) for seed in range(seeds)}
    menu = list(dict.fromkeys(choice for p in (truly, *beliefs.values()) for choice in menu_of(p)))
    costs = Costs.of(made, menu)
    top = int(costs.judge(np.full((1, len(made.units)), 0))[1][0])
    lean = truly.smallest_peak([])
    budget = int(lean + made.share * (top - lean))
    reference = scheduled(costs, budget) if made.queues else optimum(costs, budget)
    return Question(made, Truth(made), beliefs, budget, reference)


def search(q: Question, seed: int, noise: float, trials: int, space: SearchSpace | None = None) -> SearchResult:
    """One search by the engine that users get, on the made-up device."""
    clock = Clock(Silence())
    target = RealSteps(MadeUpDevice(q.truth, noise=noise, seed=seed), clock)
    budget = Budget(text=f"{q.budget} bytes", kind="bytes", size=q.budget)
    what = SearchRequest(budget=budget, space=space or load_space("knobs"), trials=trials, seed=seed)
    tried = Trials(None)
    return Loop(SolverProposer(what, q.beliefs[seed], target, tried, None), target, tried, trials, clock).run()


def rows(queues: bool, seeds: int) -> Iterator[str]:
    """Lines of the table, as they become known; the optimum is over saving everything."""
    counts = [f"after {n}: median / worst %" for n in TRIALS]
    yield ("| instance, budget | optimum | proven to | noise | " + " | ".join(counts) + " | trials used |")
    yield "|---" * (5 + len(TRIALS)) + "|"
    overall: dict[tuple[float, int], list[float]] = {}
    for seed, units, kinds, share, stages in QUEUES if queues else ADDS_UP:
        made = instance(seed, units, kinds, queues=queues, share=share, stages=stages)
        q = question(made, seeds)
        best, bound = q.reference.seconds, q.reference.bound
        for noise in NOISES:
            runs = [grown(q, s, noise) for s in range(seeds)]
            gaps = [[q.gap(run[k]) for run in runs] for k in range(len(TRIALS))]
            for count, found in zip(TRIALS, gaps, strict=True):
                overall.setdefault((noise, count), []).extend(found)
            used = [sum(t.measured is not None for t in run[-1].trials) for run in runs]
            cells = [f"{made.name}, {share:.0%}", f"{best / q.truth.of({})[0] - 1:+.1%}", f"{1 - bound / best:.2%}"]
            cells += [f"{noise:.0%}", *map(spread, gaps), f"{min(used)} to {max(used)}"]
            yield "| " + " | ".join(cells) + " |"
    for noise in NOISES:
        cells = ["**all**", "", "", f"{noise:.0%}", *(spread(overall[noise, n]) for n in TRIALS), ""]
        yield "| " + " | ".join(cells) + " |"


def grown(q: Question, seed: int, noise: float) -> list[SearchResult]:
    """The searches with each limit of trials. One that ended by itself would end the same way with a higher limit."""
    found: list[SearchResult] = []
    for limit in TRIALS:
        by_itself = found and not found[-1].stopped.startswith("all ")
        found.append(found[-1] if by_itself else search(q, seed, noise, limit))
    return found


def spread(gaps: list[float]) -> str:
    """Median and worst, in percent."""
    return f"{100 * statistics.median(gaps):.2f} / {100 * max(gaps):.2f}"
