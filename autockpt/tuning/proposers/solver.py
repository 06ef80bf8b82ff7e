"""Candidates by the exact solver, steered by a few knobs that Optuna samples.

Measured trials correct the cost coefficients that the solver plans with. So one number per kind of choice is searched,
instead of one choice per layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import filterfalse, groupby

from autockpt.cost import LEAN_CALLS, CostModel
from autockpt.errors import InfeasibleError
from autockpt.schema import SAVE, Choice, Prediction, ResolvedBudget, SearchRequest, Trial, format_bytes
from autockpt.schema.baselines import ALL, NONE, baseline_plans
from autockpt.schema.request import Silence
from autockpt.solvers import Checked, exact, leanest, refine_segmented, refine_split
from autockpt.solvers.problem import Assignment, Problem, peak_of, seconds_of
from autockpt.solvers.refine import solved
from autockpt.solvers.split import Accept
from autockpt.tuning.clock import PROFILING
from autockpt.tuning.infeasible import nothing_fits
from autockpt.tuning.loop import Loop, Proposer
from autockpt.tuning.proposers.sampler import NEUTRAL, Study, knobs_for, sampler_for
from autockpt.tuning.refit import Fit, expected_seconds, fit, noise_of, of_known_noise, offers, unseen_bytes
from autockpt.tuning.targets.base import CHECKS, Target
from autockpt.tuning.trials import (
    AS_FAST,
    AS_LEAN,
    HIDDEN_COPIES,
    KNOBS,
    SOLVER,
    Candidate,
    Parameters,
    Plans,
    Result,
    Trials,
    peak_of_trial,
)

MARGINS = (0.0, 0.02, 0.05)  # shares of the budget that are left free in the plans that are tried first
REFITS = (1, 3, 6)  # numbers of scored candidates after which the first points are tried again, with fitted costs
SIMPLE_CALLS = 3  # ghost runs spent on refining a simple plan, or the one that hides no copies
SIMPLE_WORTH = 0.1  # of the step: simple plans that are predicted to be slower than their best by more are not tried
MOST_SIMPLE = 2
SURE = 0.05  # of the step: predictions of baselines are off by less
FEW_RUNS = 3
CLOSE = 1.1  # of the budget: a plan that reserves more is most likely too large even if the allocator frees its cache
MOST_REPEATS = 12  # known plans in a row after which the search ends
SIMULATED_REPEATS = 4  # the same in a simulation, where the coefficients are right from the start
MOST_MISSES = 3  # candidates of a simulation that do not fit


class SolverProposer(Proposer):
    """Proposes plans of the solver for one request; their predictions come from ghost runs and op times.

    ``seeds`` are plans to try early, by name. The trials' clock limits the number of ghost runs, and its listener is
    notified of them where a candidate takes many.
    """

    def __init__(
        self, request: SearchRequest, cost_model: CostModel, target: Target, trials: Trials, seeds: Plans
    ) -> None:
        self.request, self.cost_model, self.target, self.trials = request, cost_model, target, trials
        self.clock = trials.clock
        self.seeds = seeds
        self.baselines = baseline_plans([u.name for u in cost_model.blocks], request.space.choices)
        self.device = cost_model.predictor.device
        self.available_bytes = self.device.capacity_bytes - cost_model.used_by_others
        self.unscaled_problem = cost_model.problem(0)
        trials.nominal = cost_model.profile.op_times.nominal
        self.smallest_peak = self._plain_smallest = 0
        self.checks: dict[tuple[Choice, ...], Checked] = {}
        self._refit_due = False
        self._ghost_seconds = 0.0  # of the last ghost run

    def begin(self) -> None:
        """Ghost-run the baselines, find the leanest plan, and open the study.

        Raises InfeasibleError for a budget in bytes that no plan fits, RunDirectoryError for a study that cannot be
        opened, both before any step.
        """
        lean_calls, baselines = LEAN_CALLS, self.baselines
        budget, predictor = self.request.budget, self.cost_model.predictor
        if self.clock.passed(PROFILING):
            lean_calls, baselines = 1, {name: plan for name, plan in baselines.items() if name in (NONE, ALL)}
        self.clock.listener.stage("ghost-run baselines", len(baselines) + lean_calls)
        with predictor.watched(self.clock.listener):
            smallest = self.cost_model.smallest_peak(baselines.values(), lean_calls)
            if (most := budget.budget_bytes) is not None and most < smallest:
                # an allocator may divide the memory of a mixed plan so badly that a simpler one is leaner
                for choices in filterfalse(predictor.over_host, self.cost_model.last_resorts()):
                    if smallest > most and (peak := self._predict(choices).peak_bytes) < smallest:
                        smallest, self.seeds = peak, {**self.seeds, "leanest": choices}
            self._plain_smallest = smallest
            if self.cost_model.head is not None and budget.kind == "activation_share":  # of baselines
                self._plain_smallest = self.cost_model.smallest_peak(baselines.values(), lean_calls, plain_head=True)
        seeds = [choices for choices in self.seeds.values() if not predictor.over_host(choices)]
        self.smallest_peak = min([smallest, *(self._predict(choices).peak_bytes for choices in seeds)])
        # Until the baselines have run, the best guess of what the budget is in bytes.
        top = self._predict(self.baselines[NONE]).peak_bytes
        self.trials.budget = budget.resolved(top, self._plain_smallest, self.available_bytes, self.device.kind)
        self.trials.expected = lambda: expected_seconds(self.unscaled_problem, self.trials.scored)
        if budget.kind == "bytes" and self.trials.budget.bytes < self.smallest_peak:
            raise self.infeasible()
        run, name, storage = self.trials.run, "search", None
        if run is not None:  # no other run has a study of this name in a storage that several share
            own = run.storage if self.request.measures else None  # a simulation asks for few points
            name, storage = f"{run.path.name}-{run.id}", self.request.storage or own
        sampler = sampler_for(self.request.seed + self.trials.resumed)
        knobs = knobs_for(self.request.space.choices, copies_hide=self.device.copy_queues)
        self.study = Study(sampler, knobs, name=name, storage=storage)

    def baseline_candidates(self, loop: Loop) -> Iterator[Candidate]:
        """The baselines. The two that define a relative budget are tried even after a limit is reached."""
        for name, choices in self.baselines.items():
            if name in (NONE, ALL) or not loop.used_up():
                candidate = self._candidate(choices, name, "baseline")
                yield replace(candidate, outclassed=self._is_outclassed(candidate))
        if not self.trials.scored and self.cost_model.head is None and self.request.measures:
            raise self.infeasible()

    def _is_outclassed(self, candidate: Candidate) -> bool:
        """Whether a baseline is predicted not to fit, or to be slower than another one that fits.

        Never for the two that define a relative budget. Baselines that were not ghost-run for lack of time do not
        count.
        """
        ours, most, predictor = candidate.predicted, self._budget.bytes, self.cost_model.predictor
        assert ours is not None
        if candidate.name in (NONE, ALL):
            return False
        running = (plan for plan in self.baselines.values() if predictor.known(plan) and not predictor.over_host(plan))
        others = [*map(self._predict, running)]
        least = min((p.step_seconds or 0.0 for p in others if p.peak_bytes <= most), default=math.inf)
        return ours.peak_bytes > (1 + AS_LEAN) * most or (ours.step_seconds or 0.0) > (1 + SURE) * least

    # -- the budget ---------------------------------------------------------------------------------------------------

    def resolve(self, stopped: str) -> bool:
        """Resolve the budget by this job's own peaks, measured where they could be."""
        running = {name: c for name, c in self.baselines.items() if not self.cost_model.predictor.over_host(c)}
        peaks = {name: peak_of_trial(t) for name, c in running.items() if (t := self.trials.find(c)) is not None}
        # The leanest plan is perhaps known from its ghost run alone, which may miss what the measured ones showed.
        least = min(self._plain_smallest + unseen_bytes(self.trials.scored), *peaks.values())
        budget = self.request.budget.resolved(peaks[NONE], least, self.available_bytes, self.device.kind)
        none, notes = self.trials.find(self.baselines[NONE]), self.target.notes
        if self.request.budget.kind in ("share", "activation_share") and none is not None and none.score is None:
            notes.append("Saving everything does not fit the device: the percentage is of its simulated peak.")
        if budget.bytes > self.available_bytes:
            free = format_bytes(self.available_bytes)
            notes.append(f"The device has less free than the budget ({free}); what does not fit there was not run.")
        self.trials.judge(budget)
        self._learn_budget()
        return any(item.choice.gathered for menu in self.cost_model.profile.menus for item in menu.items)

    def _learn_budget(self) -> None:
        """Predict with an allocator that is limited to the budget, which may reserve less than an unlimited one.

        Bytes that ghost runs were seen to miss are subtracted from that budget.
        """
        self.cost_model.keep_within(self._usable_bytes - unseen_bytes(self.trials.scored))
        for trial in self.trials.scored:
            close = not trial.feasible and peak_of_trial(trial) <= CLOSE * self._usable_bytes
            if trial.state == "simulated" and close:
                self.trials.put(trial.model_copy(update={"predicted": self._predict(trial.choices)}))

    @property
    def _budget(self) -> ResolvedBudget:
        """The budget in bytes; a guess before the baselines have run."""
        assert self.trials.budget is not None
        return self.trials.budget

    def infeasible(self) -> InfeasibleError:
        measured = [trial.measured.peak_bytes for trial in self.trials.scored if trial.measured is not None]
        smallest = min(self.smallest_peak, self.cost_model.smallest_budget() or self.smallest_peak)
        return nothing_fits(self.cost_model, self._budget, smallest, min(measured, default=0))

    # -- candidates ---------------------------------------------------------------------------------------------------

    def candidates(self, loop: Loop) -> Iterator[Candidate]:
        """Plans to start from and simple plans, the solver's at the sampler's points, finally simpler or leaner ones.

        One plan of the solver is tried even if tracing and profiling used up the time limit.
        """
        measures, tried, repeats = self.request.measures, 0, 0
        most = MOST_REPEATS if measures else SIMULATED_REPEATS
        # in a simulation progress counts ghost runs
        with self.cost_model.predictor.watched(Silence() if measures else self.clock.listener):
            for candidate in self._first_candidates():
                if self.trials.find(candidate.choices) is None and not loop.used_up():
                    yield candidate
            one_late = not self.trials.spent
            while not loop.used_up(one_late=one_late):
                if repeats >= most and loop.stop_if("the space offers no further plan within the budget"):
                    break
                if loop.stop_if(self._nothing_left()):
                    break
                number, candidate = self._propose()
                repeats, one_late = repeats + 1, False
                if self.trials.find(candidate.choices) is None:
                    yield candidate
                    tried, repeats = tried + 1, 0
                    if tried in REFITS:
                        self._refit_due = True
                self._report(number, self.trials.find(candidate.choices))
            last = self._last_candidates()
            while not loop.late and (candidate := next(last, None)) is not None:
                yield candidate

    def _first_candidates(self) -> Iterator[Candidate]:
        """The plans to start from and simple plans; then the sampler's first points are set."""
        for name, choices in self.seeds.items():
            fits = self._predict(choices).peak_bytes <= self._budget.bytes
            yield self._candidate(choices, name, "seed", fits=fits)
        if self.request.measures:  # measured steps correct the costs
            yield from self._simple_candidates()
        points = self._first_points()
        if not any(point.get(HIDDEN_COPIES) for point in points):  # then the sampler need not try it either
            self.study.knobs = [knob for knob in self.study.knobs if knob != HIDDEN_COPIES]
        self.study.enqueue(points)

    def _simple_candidates(self) -> list[Candidate]:
        """Split plans, as people write them by hand: the best for each kind of choice and saving, and the best of all.

        Plans that are predicted to be slow are left out.
        """
        problem = self._problem(self._fit.scale)
        kinds = {option.choice.kind for unit in problem.units for option in unit.options if unit.name != problem.head}
        accepted: list[Accept] = [lambda *_: True]
        calls = SIMPLE_CALLS * len(kinds)
        slow = not self.request.measures or self._affordable(calls) < calls
        if not slow:  # a ghost run for every kind of choice is affordable
            accepted += [partial(_of_kind, kind) for kind in sorted(kinds - {SAVE.kind})]
        found = [self._split_plan(problem, pair) for pair in accepted]
        plans = sorted((plan for plan in found if plan is not None), key=lambda plan: plan.seconds)
        near = [p for p in plans if p.seconds <= plans[0].seconds + SIMPLE_WORTH * abs(problem.base_seconds)]
        return [self._solver_candidate(plan) for plan in near[:MOST_SIMPLE]]

    def _last_candidates(self) -> Iterator[Candidate]:
        """Leaner and split plans as fast as the best; simple plans where nothing fits yet and these were not tried."""
        best = self.trials.best
        if best is None:
            yield from () if self.request.measures else self._simple_candidates()
            return
        hidden = float(best.parameters.get(HIDDEN_COPIES, 0.0))
        problem = self._problem(self._fit.scale, hidden=hidden)
        if not offers(problem, best.choices):
            return
        chosen, alike = {unit.name: SAVE for unit in problem.units} | best.choices, int(AS_LEAN * problem.budget_bytes)
        most = seconds_of(problem, chosen) + AS_FAST * best.score_seconds
        lean = leanest(problem, most)
        budgets = [problem.budget_bytes]
        if lean is not None and lean.peak < peak_of(problem, chosen) - alike:
            yield self._solver_candidate(lean)
            budgets.append(min(problem.budget_bytes, lean.peak + alike))
        for budget_bytes in budgets:
            within = problem.model_copy(update={"budget_bytes": budget_bytes})
            plan = self._split_plan(within, below=math.nextafter(most, math.inf))
            if plan is not None:
                yield self._solver_candidate(plan)

    def _split_plan(
        self, problem: Problem, accept: Accept = lambda *_: True, below: float = math.inf
    ) -> Assignment | None:
        """The fastest split plan whose ghost run fits, if it takes less than ``below`` seconds."""
        return refine_split(problem, self._check, accept, max_calls=self._affordable(SIMPLE_CALLS), below=below)

    def _solver_candidate(self, plan: Assignment) -> Candidate:
        """A plan that no sampler asked for, named by its groups of layers where they are few."""
        choices = self.cost_model.plan(plan.choices)
        runs = [(choice.kind, len(list(run))) for choice, run in groupby(choices.values())]
        name = ", ".join(f"{count} {kind}" for kind, count in runs) if len(runs) <= FEW_RUNS else "leaner, as fast"
        fits = self._predict(choices).peak_bytes <= self._usable_bytes
        return self._candidate(choices, name, SOLVER, fits=fits)

    def _candidate(self, choices: Mapping[str, Choice], name: str, encoding: str, *, fits: bool = True) -> Candidate:
        """A plan with its prediction. It is not measured if that does not fit or ``fits`` is False."""
        predicted, result = self._predict(choices), None
        if self.cost_model.predictor.over_host(choices):
            result = Result("predicted_over", message=f"{format_bytes(predicted.host_bytes)} on the host")
        elif predicted.peak_bytes > self.available_bytes or not fits:
            result = Result("predicted_over")
        return Candidate(dict(choices), name, encoding, predicted=predicted, result=result)

    def _propose(self) -> tuple[int, Candidate]:
        """The plan at the sampler's next point, and its number there."""
        if self._refit_due:
            self.study.enqueue(self._first_points())
            self._refit_due = False
        number, parameters = self.study.ask()
        choices, fits = self._solved(parameters, CHECKS)
        candidate = self._candidate(self.cost_model.plan(choices), f"{KNOBS} #{number}", KNOBS, fits=fits)
        return number, replace(candidate, parameters=parameters)

    def _report(self, number: int, trial: Trial | None) -> None:
        """Report a trial to the sampler: measured where there is a measurement, predicted where it did not fit."""
        reading = trial and (trial.measured or trial.predicted)
        if trial is None or reading is None or reading.step_seconds is None:
            self.study.fail(number)
            return
        over = reading.peak_bytes / self._budget.bytes - 1
        violation = min(over, 0.0) if trial.feasible else max(over, 0.01)
        self.study.tell(number, reading.step_seconds, violation, trial)

    def _nothing_left(self) -> str:
        """Why no better plan can be found; empty if one may be."""
        tried = [t for t in self.trials.all if t.encoding == KNOBS]
        if not self.request.measures and (any(t.feasible for t in tried) or len(tried) >= MOST_MISSES):
            return "the solver's plan is refined, and in a simulation nothing else can beat it by much"
        if self.request.measures and (self._optimum_is_beaten() or self._optimum_was_tried()):
            return "with costs corrected by these trials no plan can be faster than the best by more than the noise"
        return ""

    def _optimum_is_beaten(self) -> bool:
        """Whether the best trial is faster than the solver's optimum at fitted costs, less the largest error seen."""
        best = self.trials.best
        candidates = [t for t in self.trials.scored if t.encoding not in ("baseline", SOLVER)]
        if best is None or best.score is None or len(candidates) < len(MARGINS):
            return False
        fitted = self._fit
        optimum = exact(self._problem(fitted.scale))
        if not optimum.feasible:
            return False
        bound = fitted.predict(self.unscaled_problem, optimum.choices) - fitted.error_seconds
        noise = best.measured.noise if best.measured is not None else 0.0
        return best.score_seconds * (1 - noise) <= bound

    def _optimum_was_tried(self) -> bool:
        """Whether the solver's plan at fitted costs, or one as fast, was tried and was as fast as predicted.

        Not while copies may hide behind more compute than the coefficients say.
        """
        if HIDDEN_COPIES in self.study.knobs or not any(t.encoding == KNOBS for t in self.trials.scored):
            return False
        predict, problem = self._fit.predict, self.unscaled_problem
        choices, _ = self._solved({}, CHECKS)
        most = predict(problem, choices) * (1 + AS_FAST)
        fitting = [t for t in of_known_noise(self.trials.scored) if t.feasible and offers(problem, t.choices)]
        known = [(t, seconds) for t in fitting if (seconds := predict(problem, t.choices)) <= most]
        return any(t.score_seconds <= seconds * (1 + max(AS_FAST, 2 * noise_of(t))) for t, seconds in known)

    # -- cost coefficients and plans -----------------------------------------------------------------------------------

    @property
    def _fit(self) -> Fit:
        """Cost coefficients fitted to the trials so far."""
        return fit(self.unscaled_problem, self.trials.scored)

    def _problem(self, scale: Mapping[str, float], *, margin: float = 0.0, hidden: float = 0.0) -> Problem:
        """The planning problem with costs scaled by kind of choice and a ``margin``, a share of the budget, left free.

        ``hidden`` is the share of the link's time in forward that hidden copies may take.
        """
        budget_bytes = self._ghost_budget_bytes - int(self._usable_bytes * margin)
        return self.cost_model.problem(budget_bytes, scale, hidden=hidden)

    @property
    def _ghost_budget_bytes(self) -> int:
        """What a ghost run may hold: the budget less the context, and less what ghost runs were seen to miss."""
        return self._usable_bytes - self.device.overhead_bytes - unseen_bytes(self.trials.scored)

    @property
    def _usable_bytes(self) -> int:
        """The budget, or what is free on the device where that is less."""
        return min(self._budget.bytes, self.available_bytes)

    def _predict(self, choices: Mapping[str, Choice]) -> Prediction:
        return self.cost_model.predictor.predict(choices)

    def _check(self, choices: Mapping[str, Choice]) -> Checked:
        """Check a plan by its ghost run."""
        fresh, began = self.cost_model.predictor.known(choices) is None, self.clock.elapsed
        checked = self.cost_model.check(choices)
        self._ghost_seconds = self.clock.elapsed - began if fresh else self._ghost_seconds
        return checked

    def _affordable(self, calls: int) -> int:
        """``calls`` ghost runs, or as many as fit a quarter of the time left; at least one."""
        if self._ghost_seconds > 0:
            calls = int(min(calls, self.clock.seconds_left / 4 / self._ghost_seconds))
        return max(1, calls)

    def _problem_at(self, parameters: Parameters) -> Problem:
        """The planning problem with these knobs; ``<kind>_price`` is a factor on the fitted costs."""
        fitted = self._fit.scale
        kinds = {name.removesuffix("_price") for name in parameters if name.endswith("_price")} | {*fitted}
        scale = {kind: fitted.get(kind, 1.0) * float(parameters.get(f"{kind}_price", 1.0)) for kind in kinds}
        margin, hidden = (float(parameters.get(name, 0.0)) for name in ("margin", HIDDEN_COPIES))
        return self._problem(scale, margin=margin, hidden=hidden)

    def _solved(self, parameters: Parameters, calls: int) -> tuple[dict[str, Choice], bool]:
        """The solver's plan with these knobs, and whether its ghost run fits."""
        problem = self._problem_at(parameters)
        found = refine_segmented(
            problem,
            self._check,
            self.cost_model.segments,
            max_calls=self._affordable(calls),
            remembered=self.checks,
        )
        fits_host = problem.fits_host(found.checked.host_bytes)
        return found.choices, fits_host and found.checked.peak_bytes <= self._ghost_budget_bytes

    def _first_points(self) -> list[Parameters]:
        """The sampler's first points: the costs as they are, with several margins; before these the point with all
        copies hidden that the link has time for, where its plan is predicted to be faster.

        The solver adds up costs per unit, as if each had only its own compute to hide its copies behind. The simulated
        step of a plan knows the whole schedule.
        """
        neutral = {knob: NEUTRAL[knob] for knob in self.study.knobs}
        plain: list[Parameters] = [{**neutral, "margin": margin} for margin in MARGINS]
        if HIDDEN_COPIES not in neutral or self._affordable(SIMPLE_CALLS) <= 1:
            return plain
        hidden = {**plain[0], HIDDEN_COPIES: 1.0}
        return [hidden, *plain] if self._is_faster(hidden, plain[0]) else plain

    def _is_faster(self, hidden: Parameters, plain: Parameters) -> bool:
        """Whether the solver's plan with copies hidden fits and is the faster one in the simulated step."""
        first, other_first = (solved(self._problem_at(point), {}).choices for point in (hidden, plain))
        self.cost_model.predictor.ahead([first, other_first])
        choices, fits = self._solved(hidden, CHECKS)  # remembered for the plan to propose
        if not fits:
            return False
        seconds, other = self._predict(choices).step_seconds or 0.0, self._predict(other_first)
        if other.peak_bytes > self._usable_bytes and seconds < (other.step_seconds or 0.0):
            return True  # what fits is hardly ever faster than what does not
        choices, fits = self._solved(plain, SIMPLE_CALLS)
        return not fits or seconds < (self._predict(choices).step_seconds or 0.0)


def _of_kind(kind: str, front: Choice, back: Choice) -> bool:
    """Whether one part of a split plan makes a choice of this kind and the other saves."""
    return {front.kind, back.kind} == {kind, SAVE.kind}
