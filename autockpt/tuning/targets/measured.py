"""The target that measures real steps, in a worker process or in this one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from autockpt.cost import CostModel, local_memory, measure_op_times, used_by_others
from autockpt.cost.profile import leanest_uniform
from autockpt.errors import DeviceOutOfMemory
from autockpt.measuring import Measurer, WorkerMeasurer
from autockpt.measuring.base import beats_counted, cycles_to_time
from autockpt.measuring.device_lock import host_link_lock
from autockpt.schema import Choice, Measurement, OpTimes, SearchSpace, Trial, plan_hash
from autockpt.schema.baselines import NONE
from autockpt.tracing import Tracer
from autockpt.tuning.clock import PROFILING, TIMING, Clock
from autockpt.tuning.finals import (
    BATCH,
    MOST_ROUNDS,
    contenders,
    first_rounds,
    race,
    remeasured,
    weighed,
    weighed_error,
)
from autockpt.tuning.infeasible import out_of_memory
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.refit import noise_of, of_known_noise
from autockpt.tuning.targets.base import Prepared, Target
from autockpt.tuning.traced_model import trace_model, tracer_of
from autockpt.tuning.trials import AS_FAST, NAMED, Candidate, Result, Trials, preferred

FINAL_SECONDS = 15.0
FINALS_SHARE = 0.2
"""The largest share of the time limit that is kept for the finals."""
HURRIED = 0.75
"""Share of the time limit after which candidates are timed by a single step."""
CONFIRMING_STEPS = 20

MOST_ERROR = 0.01
"""Share of the step: plans that differ by more never count as equally fast, however noisy their measurements."""
SWINGS = 0.25
"""Relative noise of a step that other work on the machine must have caused."""
BUSY = "Step times vary strongly: other processes seem to use the machine. Search again with --fresh when it is idle"
ON_CORES = (
    ", or leave cores to them, here and in training (OMP_NUM_THREADS): threads that wait for one another are slow"
)


@dataclass
class Measured(Target):
    """Measures a described workload in a worker process, or a live step in this process.

    Candidates are measured one by one, the best few again interleaved, and the winner once more in a fresh process.
    """

    clock: Clock
    measurer: Measurer
    step_seconds: float = field(default=1.0, init=False)  # of the last plan
    measured_before: dict[str, Measurement] = field(default_factory=dict, init=False)  # for the profile, by plan

    def trace(self, stack: ExitStack) -> Prepared:
        """Ghost-run the step while the worker process imports and builds it."""
        request, clock = self.request, self.clock
        clock.listener.stage("trace")
        tracer = stack.enter_context(tracer_of(request))
        space, notes = self.allowed(tracer)
        traced = trace_model(tracer, space, request.allow_inexact, listener=clock.listener)
        clock.listener.stage("build")  # the worker is asked: a context in this process would stay open
        environment = self.measurer.environment
        if isinstance(self.measurer, WorkerMeasurer):  # which aborts its steps at the time limit
            stack.enter_context(self.measurer.within(clock.seconds_until_stopped))
        others = used_by_others(self.measurer)  # seen from this process, the worker's model would be another's
        compiled = {"compile": request.compile} if request.compile is not None else {}
        return Prepared.of(request, traced, environment, notes, used_by_others=others, **compiled)

    def allowed(self, tracer: Tracer) -> tuple[SearchSpace, tuple[str, ...]]:
        """The part of the request's search space that the target supports, and notes on the rest."""
        return self.request.space, ()

    def cost_model(self, prepared: Prepared) -> CostModel | None:
        """Build it from op times of the device, or from nominal rates if there is no time to measure them."""
        self.clock.listener.stage("profile")
        times = self._op_times(prepared)
        cost_model = _cost_model(prepared, self.clock, times)
        if times is None:
            self.notes.append("The time limit left no room to time ops: nominal rates of the device ranked choices.")
        return cost_model

    def _op_times(self, prepared: Prepared) -> OpTimes | None:
        """Op times of the workload on the measurer's device; None if there is no time to measure them."""
        request, traced, clock = prepared.request, prepared.traced, self.clock
        device, budget_bytes = prepared.environment.device, request.budget.budget_bytes
        least = min(prepared.bytes_needed(graph) for _, graph in traced.uniform.values())
        if budget_bytes is not None and budget_bytes < least:
            untimed = _cost_model(prepared, clock)  # refused before a step is taken
            SolverProposer(request, untimed, self, Trials(None, clock), {}).begin()
        try:
            with host_link_lock(device.kind, (choices for choices, _ in traced.uniform.values()), clock.listener.note):
                times, measured = measure_op_times(
                    self.measurer,
                    traced.uniform,
                    prepared.workload_key,
                    room=device.capacity_bytes - device.overhead_bytes - prepared.used_by_others,
                    host_budget=request.host_budget,
                    heads=traced.heads,
                    listener=clock.listener,
                    left=partial(clock.seconds_within, TIMING),
                )
        except DeviceOutOfMemory as error:
            smallest = prepared.bytes_needed(leanest_uniform(traced.uniform)[1])
            raise out_of_memory("the leanest plan does not run", error.message, smallest) from None
        self.measured_before = {plan_hash(traced.uniform[kind][0]): plan for kind, plan in measured.items()}
        return times

    def evaluate(self, candidate: Candidate, budget_bytes: int | None) -> Result:
        """Measure real steps. Running out of memory is a result."""
        known = self.measured_before.get(plan_hash(candidate.choices))
        if known is not None and (budget_bytes is None or known.peak_bytes <= budget_bytes):
            return Result("measured", known)
        predicted = candidate.predicted.step_seconds if candidate.predicted is not None else None
        brief = candidate.outclassed or self.clock.passed(HURRIED)
        steps = 1 if brief else cycles_to_time(predicted or self.step_seconds)
        try:
            with self._host_link_lock(candidate):
                measured = self.measurer.measure(candidate.choices, steps=steps, budget_bytes=budget_bytes)
        except DeviceOutOfMemory as error:
            return Result("out_of_memory", message=error.message, last=error.last)
        self.step_seconds = measured.step_seconds
        return Result("measured", measured)

    def _host_link_lock(self, *plans: Candidate | Trial) -> AbstractContextManager[None]:
        kind = self.measurer.environment.device.kind
        return host_link_lock(kind, [plan.choices for plan in plans], self.clock.listener.note)

    def reserved(self, trials: Trials, baselines: Sequence[Trial]) -> float:
        """The time of the first rounds of the finals."""
        contest = [*self._finalists(trials), *saving_everything(baselines)]
        return min(first_rounds(contest), FINALS_SHARE * (self.clock.timeout or 0.0))

    def _finalists(self, trials: Trials) -> list[Trial]:
        """The few trials that may be the fastest, by their measurements and by predictions.

        Other work on the machine may have slowed down a single trial, which predictions do not know. The spread between
        measurements and predictions is taken as the error of measurements. It may be that of predictions, so the
        fastest as measured takes part as well.
        """
        if not (fitting := trials.ranking()):
            return []
        predicted = {t.number: s for t in trials.scored if t.predicted is not None and (s := t.predicted.step_seconds)}
        logs = [math.log(t.score_seconds / predicted[t.number]) for t in trials.scored if t.number in predicted]
        apart = statistics.stdev(logs) if len(logs) > 1 else 0.0
        error = max(apart, statistics.median(map(noise_of, of_known_noise(fitting) or fitting)))
        times = {t.number: t.score_seconds for t in fitting}
        return [trials.all[number] for number in contenders(times, error, {}, trials.expected(), predicted)]

    def winner(self, trials: Trials, baselines: Sequence[Trial], seconds: float) -> Trial | None:
        """Measure the best few again, interleaved, confirm the winner, and return it with its final numbers.

        Saving everything takes part as well, as overheads are relative to it. If ``seconds`` are too few for that, it
        does not. If they are too few even without, the best trial is returned as it is.
        """
        compared, finalists = saving_everything(baselines), self._finalists(trials)
        if first_rounds([*finalists, *compared]) > seconds:
            compared = []
        seconds -= first_rounds([*finalists, *compared])
        if seconds <= 0:
            self.notes.append("The time limit left no room to measure the best plans interleaved.")
            return trials.best
        seconds = min(FINAL_SECONDS, seconds)  # for all finals until a winner holds the budget
        timed = {t.number for t in compared}
        while finalists:
            began = self.clock.elapsed
            fastest, alike = self._fastest(trials, finalists, compared, baselines, seconds)
            seconds -= self.clock.elapsed - began
            timed |= {t.number for t in finalists}
            # a rescaled time is no measurement: a baseline that looks as fast as the winner is timed beside it
            others = [trials.all[t.number] for t in baselines if t.number not in timed]
            others = [t for t in others if t.feasible and t.score_seconds <= fastest.score_seconds]
            if others and first_rounds([*finalists, *others, *compared]) <= self.clock.seconds_left:
                finalists = [*finalists, *others]  # all again: times of two races cannot be compared
            elif (winner := self._confirmed(trials, fastest)).feasible:
                self.notes += [alike] if alike else []
                return winner
            else:
                finalists = self._finalists(trials)
        return None

    def _fastest(
        self, trials: Trials, finalists: list[Trial], compared: Sequence[Trial], baselines: Sequence[Trial], left: float
    ) -> tuple[Trial, str]:
        """Interleave the finalists and return the winner, and a note on plans as fast; all that took part are retimed.

        Baselines that did not take part are rescaled by the change of plain training, as they were measured with
        it. Among plans that cannot be distinguished the preferred one wins.
        """
        playing = {t.number for t in finalists}
        others = [t for n in compared if (t := trials.all[n.number]).measured and t.number not in playing]
        candidates = [*finalists, *(t for t in others if t.feasible)]
        extra = [t for t in others if not t.feasible]
        listener, expected = self.clock.listener, trials.expected()
        listener.stage("time the best, interleaved", BATCH * len(extra) + MOST_ROUNDS * len(candidates))

        with self._host_link_lock(*candidates, *extra), beats_counted(self.measurer, listener):
            final = race(candidates, extra, self.measurer.compare, expected, seconds=left)
        swings, drift = False, 1.0
        for number in final.times:
            trial = trials.all[number]
            assert trial.measured is not None
            measured = remeasured(trial.measured, number, final)
            if trial.name == NONE:
                drift = measured.step_seconds / trial.measured.step_seconds
            swings = swings or SWINGS < measured.noise < 1.0  # 1: too few rounds to tell
            trials.put(trial.model_copy(update={"measured": measured}))
        for trial in (trials.all[t.number] for t in baselines if t.number not in final.times):
            if trial.measured is not None:
                trials.put(trial.model_copy(update={"measured": trial.measured.rescaled(drift)}))
        busy = BUSY + (ON_CORES if self.measurer.environment.device.kind == "cpu" else "")
        if swings and busy not in self.notes:
            self.notes.append(busy)
        times = weighed({t.number: final.ratio(t.number) for t in candidates}, expected, final.error)
        error = min(max(AS_FAST, weighed_error(final.error, expected)), MOST_ERROR)
        named = preferred([trials.all[number] for number in times], times, trials.budget_bytes or 0, error)
        most = min(times.values()) * (1 + error)
        close = ", ".join(f"#{n}" for n, each in times.items() if each <= most and n != named.number)
        alike = f"Trial #{named.number} and {close} cannot be distinguished at the noise of this machine: {NAMED}."
        return named, alike if close else ""

    def confirm(self, choices: Mapping[str, Choice], budget_bytes: int) -> Measurement | None:
        """Measure in a fresh process that enforces the budget as a limit.

        None where the device cannot enforce one (the CPU's peak is exact anyway), and for a live model, which has no
        second copy.
        """
        worker, listener = self.measurer, self.clock.listener
        if not isinstance(worker, WorkerMeasurer) or not worker.environment.device.enforces_limit:
            return None
        listener.stage("run the best in a fresh process", CONFIRMING_STEPS)
        worker.release()  # the next request starts a new process
        with worker.within(self.clock.seconds_until_stopped), beats_counted(worker, listener):
            return worker.measure(choices, steps=CONFIRMING_STEPS, budget_bytes=budget_bytes)

    def _confirmed(self, trials: Trials, winner: Trial) -> Trial:
        """The winner with the larger of both peaks; infeasible if it did not hold the budget in a fresh process."""
        assert winner.measured is not None and trials.budget_bytes is not None
        with suppress(DeviceOutOfMemory):
            if (again := self.confirm(winner.choices, trials.budget_bytes)) is None:
                return winner
            if again.peak_bytes <= trials.budget_bytes:
                peak = max(again.peak_bytes, winner.measured.peak_bytes)
                held = winner.measured.model_copy(update={"peak_bytes": peak})
                return trials.put(winner.model_copy(update={"measured": held}))
        where = f"over {CONFIRMING_STEPS} steps in a fresh process"
        self.notes.append(f"Trial #{winner.number} did not hold the budget {where}.")
        return trials.put(winner.model_copy(update={"feasible": False, "state": "out_of_memory", "measured": None}))


def saving_everything(baselines: Sequence[Trial]) -> list[Trial]:
    """The trial of the plan that saves everything, if it was measured."""
    return [trial for trial in baselines if trial.measured is not None and trial.name == NONE]


def _cost_model(prepared: Prepared, clock: Clock, times: OpTimes | None = None) -> CostModel:
    """The cost model by these op times; without any by nominal rates, which are good for bytes and for ranking."""
    request, environment, traced = prepared.request, prepared.environment, prepared.traced
    times = times or traced.nominal(environment)
    more = {"host_budget": request.host_budget, "listener": clock.listener, "late": partial(clock.passed, PROFILING)}
    memory = local_memory(times.environment, times=times)
    return traced.cost_model(times, used_by_others=prepared.used_by_others, memory=memory, **more)
