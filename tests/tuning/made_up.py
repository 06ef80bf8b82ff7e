"""Searches on the made-up device."""

from collections.abc import Mapping
from typing import Any

import pytest
from optuna.samplers import RandomSampler

from autockpt.schema import Choice, SearchRequest, SearchSpace, Silence, Trial, parse_budget
from autockpt.schema.choices import dump_choice
from autockpt.schema.run_directory import RunDirectory
from autockpt.tuning.clock import Clock
from autockpt.tuning.loop import Loop
from autockpt.tuning.proposers import solver
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.targets.measured import Measured
from autockpt.tuning.targets.simulated import Simulated
from autockpt.tuning.trials import Trials
from tests.tuning.device import MadeUpDevice


class Watcher(Silence):
    """Keeps what a search says."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.total: int | None = None
        self.steps = 0

    def stage(self, name: str, total: int | None = None) -> None:
        self.stages.append(name)
        self.total, self.steps = total, 0

    def advance(self, steps: int = 1) -> None:
        self.steps += steps

    def trial(self, trial: Trial, best: Trial | None) -> None:
        self.trials.append(trial)

    def note(self, text: str) -> None:
        self.notes.append(text)


def search(
    device: MadeUpDevice,
    budget: str,
    *,
    own_sampler: bool = False,
    trials: int = 20,
    run: RunDirectory | None = None,
    listener: Any = None,
    clock: Clock | None = None,
    timeout: float | None = None,
    confirm: Any = None,
    simulated: bool = False,
    seeds: Mapping[str, Mapping[str, Choice]] = {},
    host_budget: int | None = None,
    headroom: str | None = None,
) -> Loop:
    """What the loop finds with the solver's plans. ``own_sampler``: with the sampler of real searches, which fits a
    Gaussian process before each trial; drawing at random costs nothing, and what the loop does is the same."""
    clock = clock or Clock(listener or Silence(), timeout)
    more = {"trials": trials, "host_budget": host_budget, "simulate": simulated}
    request = SearchRequest(budget=parse_budget(budget).with_headroom(headroom), space=SearchSpace(), **more)
    target = Simulated(request, clock) if simulated else Measured(request, clock, device)  # type: ignore[arg-type]
    if confirm is not None:
        target.confirm = confirm  # type: ignore[union-attr]
    tried = Trials(run, clock)
    profiled = device.profiled(host_budget=host_budget)
    proposer = SolverProposer(request, profiled, target, tried, seeds)
    with pytest.MonkeyPatch.context() as patch:
        if not own_sampler:
            patch.setattr(solver, "sampler_for", lambda seed: RandomSampler(seed))
        loop = Loop(proposer, target, tried)
        loop.run()
    return loop


def search_made_up(budget: str, units: int, *, simulated: bool) -> dict[str, Any]:
    """The best plan's bytes and seconds, and the plan."""
    found = search(MadeUpDevice(units), budget, own_sampler=True, simulated=simulated)
    assert found.best is not None and found.best.score is not None
    return {
        "budget_bytes": found.budget.bytes,
        "peak_bytes": found.best.score.peak_bytes,
        "step_seconds": found.best.score_seconds,
        "plan": {name: dump_choice(choice) for name, choice in found.best.choices.items()},
    }
