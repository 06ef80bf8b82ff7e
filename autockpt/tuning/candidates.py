"""From a point of the search space to a plan that fits: the solver's, steered by knobs, or per layer and repaired."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from autockpt.schema import Choice, Problem, SearchSpace, from_label, host_of, option_of, peak_of
from autockpt.solvers import Ruling, refine
from autockpt.solvers.refine import FASTER
from autockpt.tuning.study import Parameters

Referee = Callable[[Mapping[str, Choice]], Ruling]
MakeProblem = Callable[[Mapping[str, float], int], Problem]  # prices by kind, bytes left free -> problem

REFEREE_CALLS = 8
REPAIRS = 4
COPY_PRICES = (0.5, 0.2, 0.1)  # of the profile's, for copies that hide behind other units' compute than their own
LADDER_CALLS = 3  # ghost runs spent on each


@dataclass(frozen=True)
class Candidate:
    """A plan worth a real step. ``fits`` is what its ghost run says."""

    choices: dict[str, Choice]
    fits: bool


def neutral(space: SearchSpace, margin: float) -> Parameters:
    """The knobs that trust the profile as it is, with a share of the budget left free."""
    parameters: Parameters = {
        name: knob.neutral if knob.neutral is not None else knob.low for name, knob in space.knobs.items()
    }
    if "margin" in parameters:
        parameters["margin"] = min(max(margin, space.knobs["margin"].low), space.knobs["margin"].high)
    return parameters


def hidden_copies(
    plain: Parameters, space: SearchSpace, scale: float, foreseen: Callable[[Parameters], float]
) -> list[Parameters]:
    """The knobs of ``plain`` with the price of copies whose plan should be fastest; none where that is the fitted one.

    The solver's prices add up, as if every unit had its own compute to hide its copies behind. Between units of
    different kinds, or with few units that copy, that is too dear; ``foreseen``, the simulated step seconds of the
    solver's plan under some knobs, sees the whole schedule. ``scale`` is the fitted price as a multiple of the
    profile's, which is among the points, too: a plan in which every unit copies says little of one where a few do.
    """
    knob = space.knobs.get("offload_price")
    if knob is None:
        return []
    prices = dict.fromkeys((*COPY_PRICES, 1 / scale))
    points = [plain, *({**plain, "offload_price": p} for p in prices if knob.low <= p <= knob.high)]
    best = min(points, key=foreseen)
    return [] if best is plain else [best]


def from_knobs(
    parameters: Mapping[str, float | int | str],
    budget: int,
    scale: Mapping[str, float],
    make_problem: MakeProblem,
    referee: Referee,
    *,
    remembered: MutableMapping[tuple[Choice, ...], Ruling] | None = None,
    calls: int = REFEREE_CALLS,
    faster: float = FASTER,
) -> Candidate:
    """The solver's plan under these knobs, refined until its ghost run fits ``budget``.

    ``scale`` are the prices fitted to measurements so far; each ``<kind>_price`` knob multiplies them. ``remembered``
    holds the rulings of earlier calls; at most ``calls`` new ones are asked for,
    for plans that are faster by a share ``faster`` of the step.
    """
    kinds = {name.removesuffix("_price") for name in parameters if name.endswith("_price")} | set(scale)
    prices = {kind: scale.get(kind, 1.0) * float(parameters.get(f"{kind}_price", 1.0)) for kind in kinds}
    free = int(budget * float(parameters.get("margin", 0.0)))
    problem = make_problem(prices, free)
    refined = refine(problem, referee, max_calls=calls, remembered=remembered, faster=faster)
    fits_host = problem.host_budget is None or refined.ruling.host_bytes <= problem.host_budget
    return Candidate(dict(refined.choices), fits_host and refined.ruling.peak_bytes <= problem.budget + free)


def from_layers(
    parameters: Mapping[str, float | int | str], budget: int, problem: Problem, referee: Referee
) -> Candidate:
    """One choice per unit as sampled, repaired to the budgets: cheapest bytes first, until the ghost run fits."""
    choices = {name: from_label(str(text)) for name, text in parameters.items()}
    target, host = budget, problem.host_budget
    for _ in range(REPAIRS):
        if host is not None:
            choices = _repaired_host(problem, choices, host)
        choices = _repaired(problem, choices, target, host)
        ruling = referee(choices)
        excess = ruling.peak_bytes - budget
        over_host = 0 if problem.host_budget is None else ruling.host_bytes - problem.host_budget
        if excess <= 0 and over_host <= 0:
            return Candidate(choices, True)
        if excess > 0:
            target = min(target, peak_of(problem, choices)) - excess
        if host is not None and over_host > 0:
            host = min(host, host_of(problem, choices)) - over_host
    return Candidate(choices, False)


def _repaired_host(problem: Problem, choices: dict[str, Choice], most: int) -> dict[str, Choice]:
    """Change single units to what moves less to the host, fewest extra seconds per byte first, until ``most`` holds."""
    choices = dict(choices)
    while host_of(problem, choices) > most:
        best: tuple[float, str, Choice] | None = None
        for unit in problem.units:
            current = option_of(unit, choices[unit.name])
            for option in unit.options:
                if option.host < current.host:
                    rate = (option.seconds - current.seconds) / (current.host - option.host)
                    best = min(best or (rate, unit.name, option.choice), (rate, unit.name, option.choice), key=_rate)
        if best is None:
            return choices
        choices[best[1]] = best[2]
    return choices


def _rate(change: tuple[float, str, Choice]) -> float:
    return change[0]


def _repaired(problem: Problem, choices: dict[str, Choice], target: int, host: int | None) -> dict[str, Choice]:
    """Change single units, fewest extra seconds per byte of peak first, until the linear bound is within ``target``;
    with at most ``host`` bytes on the host."""
    choices = dict(choices)
    peak = peak_of(problem, choices)
    while peak > target:
        room = math.inf if host is None else host - host_of(problem, choices)
        best: tuple[float, int, str, Choice] | None = None
        for unit in problem.units:
            current = option_of(unit, choices[unit.name])
            for option in unit.options:
                if option.kept >= current.kept or option.host - current.host > max(room, 0):
                    continue
                lower = peak_of(problem, choices | {unit.name: option.choice})
                if lower < peak:
                    rate = (option.seconds - current.seconds) / (peak - lower)
                    if best is None or rate < best[0]:
                        best = (rate, lower, unit.name, option.choice)
        if best is None:
            return choices
        _, peak, name, choice = best
        choices[name] = choice
    return choices
