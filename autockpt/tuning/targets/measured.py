"""Searching by real steps, in a worker process or in this one; or, in a dry run, by what is known of the device."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial

from autockpt.devices import Device, get_device
from autockpt.errors import DeviceOutOfMemory, TimeLimitReached
from autockpt.hardware.nominal import nominal_op_times
from autockpt.measuring import LocalMeasurer, Measurer, WorkerMeasurer
from autockpt.measuring.environment import environment_to_measure_in
from autockpt.profiling import CostModel, cached_op_times, measure_op_times, memory_at_hand, needed_on, used_by_others
from autockpt.profiling.profile import leanest, wants_disk, within_host
from autockpt.profiling.refusals import refused_choices
from autockpt.schema import OpTimes, SearchOptions, SearchOutcome, SearchRequest
from autockpt.tracing import Tracer
from autockpt.tuning.alternatives import WhatIf, on_device
from autockpt.tuning.infeasible import naming_alternatives, out_of_memory
from autockpt.tuning.jobs import Described, Live
from autockpt.tuning.opening import Opened, live_settings, traced
from autockpt.tuning.paired_timing import Pairing
from autockpt.tuning.question import PROFILING, TIMING, TRACING, Clock, Question
from autockpt.tuning.stages import find_plan, less_than_asked, question_of, refuse_hopeless
from autockpt.tuning.targets.real_steps import RealSteps, confirmation
from autockpt.tuning.targets.simulated import DRY, Simulated
from autockpt.workload import Step, refuse_simulated


def open_measured(stack: ExitStack, request: SearchRequest, clock: Clock) -> Opened:
    """Open a search by steps in a worker process, which ``stack`` ends; in a dry run nothing is measured."""
    refuse_simulated(request.workload)
    device = get_device(request.device)
    # The worker imports and builds while the ghost runs go on here.
    worker = None
    if not request.dry_run:
        worker = WorkerMeasurer(request.workload, request.device, host_budget=request.host_budget)
        stack.enter_context(worker)
    with clock.stage("trace"):
        tracer = stack.enter_context(Tracer.from_spec(request.workload, device=device.torch_device))
        late = partial(clock.passed, TRACING)
        found = traced(tracer, request.space, request.allow_inexact, listener=clock.listener, late=late)
    if worker is None:
        environment = environment_to_measure_in(request.device)
    else:  # asking a GPU oneself would open a context, for as long as this process lives
        with clock.stage("build"):
            environment = worker.environment
    needs = needed_on(environment)
    # as the worker sees it: to this process the model that it has built would be another's
    others = device.used_by_others() if worker is None else used_by_others(worker)
    what_if = partial(on_device, request.budget, device.torch_device, environment, others, found.uniform)
    job = Described(request.workload)
    stack.enter_context(naming_alternatives(found, needs, clock, job, request.budget, what_if))
    question = question_of(request, found, request.budget, less_than_asked(request.budget, environment))
    search = partial(_dry_run, device) if worker is None else partial(search_by_steps, worker)
    return Opened(question, environment, found, clock, search)


def open_live(stack: ExitStack, step: Step, asked: SearchOptions, clock: Clock, *, others_wait: bool) -> Opened:
    """The same for a live step, in this process: a second copy of the model might not fit.

    ``others_wait`` as for ``search_step``.
    """
    measurer = stack.enter_context(LocalMeasurer(step, host_budget=asked.host_budget, others_wait=others_wait))
    environment = measurer.environment
    with clock.stage("trace"):
        tracer = stack.enter_context(Tracer.from_step(step))
        late = partial(clock.passed, TRACING)
        found = traced(tracer, asked.space, asked.allow_inexact, listener=clock.listener, late=late)

    def what_if() -> WhatIf:
        return on_device(asked.budget, step.device, environment, used_by_others(measurer), found.uniform)

    needs, job = needed_on(environment), Live(step)
    stack.enter_context(naming_alternatives(found, needs, clock, job, asked.budget, what_if))
    question = Question.of(
        asked,
        name=type(step.model).__name__,
        spec=None,
        settings=live_settings(step, tracer),
        budget=asked.budget,
        space=found.space,
        notes=(*less_than_asked(asked.budget, environment), *found.said),
    )
    return Opened(question, environment, found, clock, partial(search_by_steps, measurer))


def search_by_steps(measurer: Measurer, opened: Opened) -> SearchOutcome:
    """Profile on the device, search by real steps, write the plan."""
    clock = opened.clock
    within = measurer.within if isinstance(measurer, WorkerMeasurer) else lambda seconds: nullcontext()
    # on other devices a plan's first cycle after another's has its memory to get first
    pairing = Pairing(measurer) if measurer.environment.device.kind == "cpu" else None
    with within(clock.seconds_until_stopped):
        with clock.stage("profile"):
            opened = _without_refused(opened, measurer)
            profiled, timed = _profiled(opened, measurer)
        target = RealSteps(measurer, clock, confirmation(measurer, clock), pairing)
        if not timed:
            target.terms = replace(target.terms, knows_seconds=False)
            target.notes.append("the time limit left no room to time ops: nominal rates of the device ranked choices")
        known = opened.run is not None and opened.run.trials()
        if clock.seconds_until_stopped <= 0 and not known and isinstance(measurer, WorkerMeasurer):
            raise TimeLimitReached(f"the time limit of {clock.timeout:g} s was reached before a step was measured")
        return find_plan(opened, profiled, target)


def _without_refused(opened: Opened, measurer: Measurer) -> Opened:
    """The question, and what was traced for it, without choices that the device refuses."""
    question, found = opened.question, opened.found
    refused = refused_choices(measurer, found.uniform["save"][0], question.space.choices)
    if not refused:
        return opened
    space = question.space.without(refused)
    note = f"not on this device: {', '.join(refused)} ({next(iter(refused.values()))})"
    uniform = {kind: pair for kind, pair in found.uniform.items() if kind not in refused}
    return replace(
        opened,
        question=replace(question, space=space, notes=(*question.notes, note)),
        found=replace(found, uniform=uniform, space=space),
    )


def _profiled(opened: Opened, measurer: Measurer) -> tuple[CostModel, bool]:
    """Op times, menus and predictions of the workload on the measurer's device, and whether ops were timed there.

    Where the time limit leaves no room for that, op times are by nominal rates.
    """
    question, found, clock = opened.question, opened.found, opened.clock
    device = measurer.environment.device
    others = used_by_others(measurer)
    room = device.capacity_bytes - device.overhead_bytes - others
    budget_bytes, needs = question.budget.budget_bytes, needed_on(opened.environment)
    if budget_bytes is not None and budget_bytes < min(needs(graph) for _, graph in found.uniform.values()):
        refuse_hopeless(opened, _cost_model(opened, others))  # before a step is taken
    try:
        with clock.part("measured steps"):
            times = measure_op_times(
                measurer,
                found.uniform,
                question.workload_key,
                room=room,
                host_budget=question.host_budget,
                head=found.heads,
                listener=clock.listener,
                left=partial(clock.seconds_within, TIMING),
            )
    except DeviceOutOfMemory as error:
        smallest = needs(leanest(found.uniform)[1])
        raise out_of_memory("the leanest plan does not run", error.message, smallest) from None
    return _cost_model(opened, others, times), times is not None


def _dry_run(device: Device, opened: Opened) -> SearchOutcome:
    """Predict and solve; measure nothing. Seconds are shown where op times of this device are known."""
    question, environment, found, clock = opened.question, opened.environment, opened.found, opened.clock
    _, graph = leanest(within_host(found.uniform, environment.device, question.host_budget))
    disk = wants_disk(found.uniform, environment.device, question.host_budget)
    graphs = [graph, *(found.heads.graphs.values() if found.heads else [])]
    times = cached_op_times(environment, graphs, question.workload_key, disk=disk)
    if times is None:
        note = (
            "no op times of this workload are known on this device: choices were ranked by nominal rates, "
            "and no step times are given (a search without --dry-run measures them)"
        )
        opened = replace(opened, question=replace(question, notes=(*question.notes, note)))
    with clock.stage("profile"):
        profiled = _cost_model(opened, device.used_by_others(), times)
    return find_plan(opened, profiled, Simulated(terms=replace(DRY, knows_seconds=times is not None)))


def _cost_model(opened: Opened, others: int, times: OpTimes | None = None) -> CostModel:
    """What choices cost by these op times; by nominal rates where none are known, good for bytes and for ranking."""
    question, environment, found = opened.question, opened.environment, opened.found
    if times is None:
        heads = found.heads.graphs.values() if found.heads else ()
        lean = leanest(within_host(found.uniform, environment.device, question.host_budget))[1]
        times = nominal_op_times(environment, lean, *heads, found.uniform["save"][1])
    more = {"host_budget": question.host_budget, "listener": opened.clock.listener}
    more |= {"late": partial(opened.clock.passed, PROFILING)}
    needs = memory_at_hand(times.environment, times=times)
    return found.cost_model(times, used_by_others=others, needs=needs, **more)
