"""Other budgets than the one that was asked for: the solver's plans for them, and what their ghost runs say."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from autockpt.cost import CostModel, build_problem
from autockpt.errors import AutockptError
from autockpt.schema import (
    SAVE,
    Choice,
    Graph,
    Problem,
    Profile,
    Trial,
    Unit,
    format_binary,
    peak_of,
    plan_hash,
    words,
)
from autockpt.schema.choices import ChunkedLoss
from autockpt.schema.outlook import GhostAnswer, Outlook
from autockpt.schema.space import HIDDEN_COPIES
from autockpt.solvers import exact
from autockpt.tuning.loop import SearchResult
from autockpt.tuning.opening import CHUNKS
from autockpt.tuning.question import Clock
from autockpt.tuning.refit import Fit, fit, priced

BUDGETS = 24  # that the solver is asked for plans for, at most
PATIENCE = 3.0  # seconds that it may take for all of them
FEWEST, MOST = 2, 12  # of its plans that are ghost-run
SHARE = 0.1  # of the search's time that their ghost runs may take
HARDLY_SLOWER = 0.01  # of the step: plans up to that much slower are offered where they leave more room
NOTABLE_ROOM = 0.03  # of the budget
KEPT = 64  # ghost runs on record, the latest


@dataclass(frozen=True)
class ForeseenPlan:
    """A plan by the solver's model alone: bytes with the device's context, and seconds at fitted prices."""

    choices: dict[str, Choice]
    peak: int
    seconds: float


@dataclass(frozen=True)
class OtherBudgets:
    """The planning problem with prices fitted to the trials, and how far it is from ghost runs.

    ``offset`` bytes are added to the problem's own peaks: the device's context, and what ghost runs showed besides.
    Plans hide copies for a share ``hidden`` of the link's time, as the answer does. ``least`` bytes are those of the
    leanest plan that a ghost run is known of.
    """

    profile: Profile
    base: Graph
    head: Unit | None
    trials: Sequence[Trial]
    offset: int
    host_budget: int | None
    hidden: float
    least: int

    @classmethod
    def of(
        cls,
        trials: Sequence[Trial],
        profile: Profile,
        base: Graph,
        best: str,
        host_budget: int | None,
        ghosts: Iterable[GhostAnswer],
    ) -> OtherBudgets | None:
        """``best`` is the hash of the answer, ``ghosts`` what was ghost-run. None where there is nothing to choose."""
        head = profile.head(base.blocks())
        hidden = next((float(t.parameters.get(HIDDEN_COPIES, 0.0)) for t in trials if t.plan_hash == best), 0.0)
        ghost_run = [t.predicted for t in trials if t.predicted is not None] + [ghost.predicted for ghost in ghosts]
        least = min([profile.leanest_peak_bytes, *(said.peak_bytes for said in ghost_run)])
        itself = cls(profile, base, head, trials, 0, host_budget, hidden, least)
        plain, hiding = itself.unpriced
        if not any(len(unit.options) > 1 for unit in plain.units):
            return None
        saving = {unit.name: SAVE for unit in plain.units}
        errors = {
            trial.plan_hash: trial.predicted.peak_bytes - peak_of(problem, saving | trial.choices)
            for problem in (plain, hiding)
            for trial in trials
            if trial.predicted is not None and priced(problem, trial.choices)
        }
        usual = int(statistics.median(errors.values())) if errors else 0
        offset = errors.get(best, usual or profile.op_times.device.overhead_bytes)
        return replace(itself, offset=offset)

    @cached_property
    def unpriced(self) -> tuple[Problem, Problem]:
        """The problem at the profile's own prices, without hidden copies and with them."""
        return self.problem(), self.problem(hidden=self.hidden)

    @cached_property
    def prices(self) -> Fit:
        """What choices cost by the trials that have step times."""
        return fit(self.unpriced[0], [t for t in self.trials if t.score is not None])

    def walk(self) -> list[ForeseenPlan]:
        """The fastest plans by the model from saving everything down to the leanest, each at the bytes it needs."""
        prices, unpriced = self.prices, self.unpriced[1]
        fitted = self.problem(prices.scale, hidden=self.hidden)
        found: list[ForeseenPlan] = []
        began = time.monotonic()
        saving = peak_of(unpriced, {unit.name: SAVE for unit in unpriced.units}) + self.offset
        budget_bytes = max(self.profile.save_all_peak_bytes, saving, 0)
        grain = max(1, (budget_bytes - self.least) // BUDGETS)
        while len(found) < BUDGETS and time.monotonic() - began < PATIENCE:
            answer = exact(fitted.model_copy(update={"budget_bytes": budget_bytes - self.offset}), time_limit=PATIENCE)
            if not answer.feasible:
                break
            peak = peak_of(unpriced, answer.choices) + self.offset
            head = self.head.name if self.head is not None else None
            choices = {n: c for n, c in answer.choices.items() if n != head or c != SAVE}
            found.append(ForeseenPlan(choices, peak, prices.predict(unpriced, answer.choices)))
            budget_bytes = min(peak - 1, budget_bytes - grain)
        return found

    def problem(self, price: Mapping[str, float] | None = None, *, hidden: float = 0.0) -> Problem:
        """The problem of the profile; its budget is not set."""
        return build_problem(
            self.base,
            self.profile.menus,
            budget_bytes=0,
            price=price,
            host_budget=self.host_budget,
            base_seconds=self.profile.save_all_seconds,
            head=self.head,
            hidden_bandwidth=hidden * self.profile.op_times.copy_out_bandwidth,
        )


def look_around(
    profiled: CostModel, found: SearchResult, head: Unit | None, known: Outlook | None, clock: Clock
) -> Outlook:
    """All that ghost runs of this search said, and those of plans for other budgets, as far as time allows.

    ``known`` is from an earlier search of this question. ``head`` is the model's output head: what running it and the
    loss in chunks would change is ghost-run as well where that was not allowed.
    """
    assert found.best is not None
    predictor, budget_bytes, until = profiled.predictor, found.budget.bytes, clock.elapsed * (1 + SHARE)
    runs = {plan_hash(run.choices): run for run in (known.plans if known is not None else ())}
    runs |= {plan_hash(run.choices): run for run in ghost_runs(profiled)}
    best, trials = found.best, found.trials
    made_of = profiled.profile, profiled.base, best.plan_hash, profiled.host_budget
    model = OtherBudgets.of(trials, *made_of, runs.values())
    walked = [foreseen.choices for foreseen in _spread(model.walk() if model is not None else [], budget_bytes)]
    others = {key: choices for choices in walked if (key := plan_hash(choices)) not in runs}
    in_chunks = _in_chunks(profiled, best, head)
    predictor.ahead([*([in_chunks] if in_chunks else []), *[*others.values()][:FEWEST]])
    chunked = None
    clock.listener.stage("ghost-run other budgets", min(MOST, len(others)) + (in_chunks is not None))
    with predictor.watched(clock.listener):
        if in_chunks is not None:
            with suppress(AutockptError):
                chunked = predictor.elsewhere(in_chunks).peak_bytes
        for new, (key, choices) in enumerate(others.items()):
            if new >= MOST or (new >= FEWEST and clock.elapsed > until):
                break
            runs[key] = GhostAnswer(choices=choices, predicted=predictor.elsewhere(choices))
    return Outlook(plans=tuple(runs.values())[-KEPT:], chunked_peak_bytes=chunked)


def trade(best: Trial, trials: Sequence[Trial], outlook: Outlook | None, budget_bytes: int) -> str:
    """A sentence on the leanest plan that is hardly slower than the best; empty where none has notably more room.

    Measured plans are compared with measured ones. In a simulation the ghost runs of other budgets count as well.
    """
    if best.score is None or best.score.step_seconds is None:
        return ""
    most = best.score.step_seconds * (1 + HARDLY_SLOWER)
    simulated = best.state == "simulated"
    known = [best.score, *(t.score for t in trials if t.score is not None)]
    known += [run.predicted for run in outlook.plans] if outlook is not None and simulated else []
    near = [score for score in known if score.step_seconds is not None and score.step_seconds <= most]
    lean = min(near, key=lambda score: score.peak_bytes)
    room = best.score.peak_bytes - lean.peak_bytes
    if room < NOTABLE_ROOM * budget_bytes or lean.step_seconds is None:
        return ""
    slower = words.share(lean.step_seconds / best.score.step_seconds - 1, signed=True)
    noise = math.hypot(lean.noise, best.score.noise)
    within = f" ± {words.share(noise)}" if noise else ""
    return (
        f"{format_binary(room)} more room costs {slower}{within} of the step time: search with a budget of "
        f"{format_binary(lean.peak_bytes)} to get that plan."
    )


def ghost_runs(profiled: CostModel) -> tuple[GhostAnswer, ...]:
    """What the search ghost-ran so far."""
    return tuple(GhostAnswer(choices=choices, predicted=p) for choices, p in profiled.predictor.ghost_runs)


def _spread(walked: Sequence[ForeseenPlan], budget_bytes: int) -> Iterator[ForeseenPlan]:
    """The plans for the next larger and the next smaller budget first, then ever closer ones over the whole range."""
    order = sorted(walked, key=lambda f: f.peak)
    above = next((i for i, f in enumerate(order) if f.peak > budget_bytes), len(order))
    first = [i for i in (above, above - 2) if 0 <= i < len(order)]
    step = 1 << len(order).bit_length()
    rest: list[int] = []
    while step:
        rest += range(step - 1 if step < len(order) else 0, len(order), step)
        step //= 2
    yield from (order[i] for i in dict.fromkeys([*first, *rest]))


def _in_chunks(profiled: CostModel, best: Trial, head: Unit | None) -> dict[str, Choice] | None:
    """The same plan with head and loss in chunks; None where that was allowed, or there is no head.

    Its seconds are not known: nobody has timed the ops of chunks.
    """
    own = [menu for menu in profiled.profile.menus if head is not None and menu.representative == head.name]
    if head is None or any(isinstance(item.choice, ChunkedLoss) for menu in own for item in menu.items):
        return None
    return {**best.choices, head.name: ChunkedLoss(tokens=CHUNKS[1])}
