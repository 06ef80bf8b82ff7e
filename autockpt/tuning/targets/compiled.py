"""``autockpt search --compile``: a plan for compiled training, found by compiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from autockpt.devices import get_device
from autockpt.errors import UsageError
from autockpt.hardware.nominal import nominal_op_times
from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.compiled import missing
from autockpt.profiling import build_profile, used_by_others
from autockpt.schema import CompileMode, SearchOutcome, SearchRequest, StageTime
from autockpt.solvers import refine
from autockpt.tracing import Tracer
from autockpt.tuning.loop import Loop, SearchResult
from autockpt.tuning.opening import Opened, blocks_of, traced
from autockpt.tuning.outcome import make_plan, scored_rows
from autockpt.tuning.proposers.base import Plans
from autockpt.tuning.proposers.splits import SplitProposer
from autockpt.tuning.question import Clock
from autockpt.tuning.stages import conclude, less_than_asked, question_of, refusal_on_record
from autockpt.tuning.targets.base import COMPILING, STEPS
from autockpt.tuning.targets.compiled_steps import CompiledSteps
from autockpt.tuning.targets.real_steps import confirmation
from autockpt.tuning.trials import Trials
from autockpt.workload import refuse_simulated

IN_GRAPHS = ("save", "recompute")
"""Choices that can be part of a compiled graph, compile_budget besides."""
_NOT_PREDICTED = (
    "compiled steps are only measured: ghost runs and op times see eager ops, not what a compiler makes of them, so "
    "nothing is predicted (and a search without --compile offers more choices)"
)


def open_compiled(stack: ExitStack, request: SearchRequest, mode: CompileMode, clock: Clock) -> Opened:
    """Open a search by compiled steps in a worker process, which ``stack`` ends.

    Raises UsageError where nothing can be compiled here or the request contradicts compiling.
    """
    refuse_simulated(request.workload)
    device = get_device(request.device)
    _refuse(request, device.kind)
    measurer = stack.enter_context(WorkerMeasurer(request.workload, request.device, compile=mode))
    with clock.stage("trace"):
        tracer = stack.enter_context(Tracer.from_spec(request.workload, device=device.torch_device))
        if mode == "layers" and tracer.settings.get("units"):
            raise UsageError(
                f"layers are compiled by blocks that repeat, and {tracer.settings['units']} are none",
                remedy="Search with --compile model, or without --compile; leave --units out where blocks repeat.",
            )
        inside = tuple(kind for kind in request.space.choices if kind in IN_GRAPHS)
        if "recompute" not in inside:
            raise UsageError("without recompute there is nothing to choose in compiled steps", remedy="Allow it.")
        found = traced(tracer, request.space.restricted(inside), listener=clock.listener)
    outside = [kind for kind in request.space.choices if kind not in IN_GRAPHS]
    left_out = (f"not part of a compiled graph, so left out: {', '.join(outside)}",) if outside else ()
    with clock.stage("build"):
        environment = measurer.environment
    notes = (*less_than_asked(request.budget, environment), *left_out, _NOT_PREDICTED)
    question = question_of(request, found, request.budget, notes)
    question = replace(question, settings={**question.settings, "compile": mode})
    return Opened(question, environment, found, clock, partial(_searched, mode, measurer))


def _refuse(request: SearchRequest, device_kind: str) -> None:
    if why := missing(device_kind):
        raise UsageError(f"steps cannot be compiled here: {why}", remedy="Install it, or leave out --compile.")
    for given, option in (
        (request.hardware is not None, "--hardware"),
        (request.dry_run, "--dry-run"),
        (request.allow_inexact, "--allow-inexact"),
        (request.host_budget is not None, "--host-budget"),
    ):
        if given:
            raise UsageError(
                f"--compile and {option} do not go together: compiled steps can only be measured, and neither "
                "offloading nor a loss in chunks can be part of a graph",
                remedy=f"Leave out {option} or --compile.",
            )


def _searched(mode: CompileMode, measurer: WorkerMeasurer, opened: Opened) -> SearchOutcome:
    question, environment, clock, run = opened.question, opened.environment, opened.clock, opened.run
    info = environment.device
    room = info.capacity_bytes - used_by_others(measurer)
    tracer, uniform = opened.found.tracer, opened.found.uniform

    def eager(share: float) -> Plans:
        """The eager solver's plan for a budget at the same place between the eager peaks."""
        with clock.part("eager solver"):
            times = nominal_op_times(environment, uniform["recompute"][1])
            profiled = build_profile(tracer, times, uniform)
            peaks = [profiled.predictor.predict(choices).peak_bytes for choices, _ in uniform.values()]
            budget_bytes = min(peaks) + int((max(peaks) - min(peaks)) * min(max(share, 0.0), 1.0))
            problem = profiled.problem(budget_bytes - info.overhead_bytes)
            refined = refine(problem, profiled.check, max_calls=target.terms.checks)
        return {"eager solver's": dict(refined.choices)} if refined.feasible else {}

    trials = Trials(run)
    target = CompiledSteps(measurer, clock, confirmation(measurer, clock), mode=mode, within=measurer.within)
    layers, study = [unit.name for unit in blocks_of(tracer)], opened.title
    proposer = SplitProposer(question, layers, target, trials, opened.storage, room=room, eager=eager, name=study)
    with refusal_on_record(run):
        found = Loop(proposer, target, trials, question.trials, clock).run()
    found.notes.extend(_graphs(found))
    rows, plan = scored_rows(proposer.known, found.trials, found.best), None
    if found.best is not None:
        choices, notes = found.best.choices, (*found.notes, _NOT_PREDICTED)
        plan = make_plan(opened, choices, found.budget, source="measured", rows=rows, notes=notes)
        plan = plan.model_copy(update={"compile": mode})
        if run is not None:
            run.write_plan(plan)
    stages = _compiling_apart(clock.stages, found)
    return conclude(opened, found, rows, plan, source="measured", stages=stages)


def _compiling_apart(stages: Sequence[StageTime], found: SearchResult) -> tuple[StageTime, ...]:
    """The stages with what compiling took taken out of the measured steps that it preceded."""
    compiling = sum(t.measured.compile_seconds for t in found.trials[found.resumed :] if t.measured is not None)
    steps = [s.model_copy(update={"seconds": s.seconds - compiling}) if s.name == STEPS else s for s in stages]
    return (*steps, StageTime(name=COMPILING, seconds=compiling, part=True))


def _graphs(found: SearchResult) -> list[str]:
    """How many graphs the found plan became."""
    if found.best is None or found.best.measured is None:
        return []
    graphs = found.best.measured.graphs
    said = "one graph and its backward" if graphs == 1 else f"{graphs} graphs and their backwards"
    return [f"the plan's steps are compiled to {said}"]
