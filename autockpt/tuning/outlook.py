"""Plans for other budgets than the one that was asked for: the memory/time curve around the answer.

The solver proposes the fastest plan for each budget at the fitted cost coefficients; its ghost run says what the plan
needs and takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

from autockpt.cost import CostModel
from autockpt.schema import SAVE, Choice, Trial, format_binary, plan_hash, words
from autockpt.schema.trial import GhostAnswer, Outlook
from autockpt.solvers import exact
from autockpt.solvers.problem import peak_of
from autockpt.tuning.loop import Loop
from autockpt.tuning.refit import fit, offers
from autockpt.tuning.trials import HIDDEN_COPIES

BUDGETS = 12  # between the leanest plan's and that of saving everything
SOLVING = 0.3  # seconds that the solver may take for one of them
SHARE = 0.02  # of the search's time that all of them may take
HARDLY_SLOWER = 0.01  # of the step: plans up to that much slower are offered where they leave more room
NOTABLE_ROOM = 0.03  # of the budget
MOST_NOISE = 0.05  # of the step: plans whose measured time is more uncertain are not offered
KEPT = 64  # ghost runs on record, the latest


def look_around(cost_model: CostModel, loop: Loop, known: Outlook | None, share: float = SHARE) -> Outlook:
    """The predictions of this search, and of plans for other budgets, which are ghost-run here.

    All but the first take at most a ``share`` of the search's time. ``known`` is from an earlier search of this
    question.
    """
    assert loop.best is not None
    clock, predictor = loop.clock, cost_model.predictor
    until = clock.elapsed * (1 + share)
    runs = {plan_hash(run.choices): run for run in (known.plans if known is not None else ())}
    runs |= {plan_hash(run.choices): run for run in predictor.ghost_runs}
    plans = plans_around(cost_model, loop.trials.all, loop.best, loop.budget.bytes)
    others = {key: choices for choices in plans if (key := plan_hash(choices)) not in runs}
    clock.listener.stage("ghost-run other budgets", len(others))
    with predictor.watched(clock.listener):
        for new, (key, choices) in enumerate(others.items()):
            if new and clock.elapsed > until:
                break
            runs[key] = GhostAnswer(choices=choices, predicted=predictor.within_least_budget(choices))
    return Outlook(plans=tuple(runs.values())[-KEPT:])


def plans_around(
    cost_model: CostModel, trials: Sequence[Trial], best: Trial, budget_bytes: int
) -> Iterator[dict[str, Choice]]:
    """The fastest plan for each of a few budgets, the nearest to ``budget_bytes`` first, smaller and larger
    alternating. (What larger ones buy is shown by plans that did not fit this one, too.)

    Copies hide as in the ``best`` plan, and peaks are corrected by its error.
    """
    hidden = float(best.parameters.get(HIDDEN_COPIES, 0.0))
    unscaled_problem = cost_model.problem(0)
    scale = fit(unscaled_problem, [trial for trial in trials if trial.score is not None]).scale
    problem = cost_model.problem(0, scale, hidden=hidden)
    saving = {unit.name: SAVE for unit in problem.units}
    offset = cost_model.predictor.device.overhead_bytes
    if best.predicted is not None and offers(problem, best.choices):
        offset = best.predicted.peak_bytes - peak_of(problem, saving | best.choices)
    high = peak_of(problem, saving) + offset
    low = min([high, *(run.predicted.peak_bytes for run in cost_model.predictor.ghost_runs)])
    budgets = [low + (high - low) * number // BUDGETS for number in range(BUDGETS + 1)]
    larger = [size for size in budgets if size > budget_bytes]
    smaller = [size for size in reversed(budgets) if size < budget_bytes]
    for size in filter(None, chain.from_iterable(zip_longest(smaller, larger))):
        plan = exact(problem.model_copy(update={"budget_bytes": size - offset}), time_limit=SOLVING)
        if plan.feasible:
            yield cost_model.plan(plan.choices)


def trade(best: Trial, trials: Sequence[Trial], outlook: Outlook | None, budget_bytes: int) -> str:
    """A sentence on the leanest plan that is hardly slower than the best; empty where none has notably more room, or
    the best one's own time is uncertain.

    Measured plans are compared with measured ones. In a simulation the ghost runs of other budgets count as well.
    """
    if best.score is None or best.score.step_seconds is None:
        return ""
    most = best.score.step_seconds * (1 + HARDLY_SLOWER)
    simulated = best.state == "simulated"
    known = [best.score, *(t.score for t in trials if t.score is not None)]
    known += [run.predicted for run in outlook.plans] if outlook is not None and simulated else []
    near = [score for score in known if (score.step_seconds or math.inf) <= most and score.noise <= MOST_NOISE]
    lean = min(near, key=lambda score: score.peak_bytes, default=best.score)
    room = best.score.peak_bytes - lean.peak_bytes
    if room < NOTABLE_ROOM * budget_bytes or lean.step_seconds is None or best.score.noise > MOST_NOISE:
        return ""
    change, noise = lean.step_seconds / best.score.step_seconds - 1, math.hypot(lean.noise, best.score.noise)
    within = f" ± {words.share(noise)}" if noise else ""
    price = f"{words.share(change, signed=True)}{within} of the step time"
    if abs(change) <= noise:
        price = f"about no step time (±{words.share(noise)})"
    return (
        f"{format_binary(room)} more room costs {price}: search with a budget of {format_binary(lean.peak_bytes)} to "
        "get that plan."
    )
