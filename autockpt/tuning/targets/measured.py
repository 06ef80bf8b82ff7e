"""Search by real steps, in a worker process or in this one; or, in a dry run, by what is known of the device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from autockpt.cost import CostModel, cached_op_times, measure_op_times, memory_at_hand, needed_on, used_by_others
from autockpt.cost.profile import leanest, wants_disk, within_host
from autockpt.cost.roofline import nominal_op_times
from autockpt.devices import get_device
from autockpt.errors import DeviceOutOfMemory, TimeLimitReached
from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.environment import environment_to_measure_in
from autockpt.schema import Environment, OpTimes, SearchRequest
from autockpt.tracing import Tracer
from autockpt.tuning.infeasible import out_of_memory
from autockpt.tuning.opening import Traced, less_than_asked, traced
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.question import PROFILING, TIMING, TRACING, Clock
from autockpt.tuning.sizes import what_if_of
from autockpt.tuning.targets.base import Prepared, Target
from autockpt.tuning.targets.real_steps import RealSteps, confirmation
from autockpt.tuning.targets.simulated import DRY, Simulated
from autockpt.tuning.trials import Trials


@dataclass(kw_only=True)
class Measured(RealSteps):
    """Real steps of a described workload in a worker process, or of a live one in this process."""

    request: SearchRequest

    def trace(self, stack: ExitStack) -> Prepared:
        """The worker imports and builds while the ghost runs go on here."""
        request, clock, measurer = self.request, self.clock, self.measurer
        found = _traced(stack, request, clock)
        if isinstance(measurer, WorkerMeasurer):
            with clock.stage("build"):  # asking a GPU oneself would open a context, for as long as this process lives
                environment = measurer.environment
            stack.enter_context(measurer.within(clock.seconds_until_stopped))
        environment = measurer.environment
        self.confirm = confirmation(measurer, clock)
        # as the worker sees it: to this process the model that it has built would be another's
        return _prepared(request, found, environment, used_by_others(measurer))

    def cost_model(self, prepared: Prepared, trials: Trials) -> CostModel:
        """By op times of the device; by nominal rates where the time limit leaves no room to time them."""
        with self.clock.stage("profile"):
            others = used_by_others(self.measurer)
            times = self._op_times(prepared, others)
            profiled = _cost_model(prepared, self.clock, others, times)
        if times is None:
            self.terms = replace(self.terms, knows_seconds=False)
            self.notes.append("the time limit left no room to time ops: nominal rates of the device ranked choices")
        late = self.clock.seconds_until_stopped <= 0
        if late and not trials.all and isinstance(self.measurer, WorkerMeasurer):
            raise TimeLimitReached(f"the time limit of {self.clock.timeout:g} s was reached before a step was measured")
        return profiled

    def _op_times(self, prepared: Prepared, others: int) -> OpTimes | None:
        """Op times of the workload on the measurer's device; None where the time limit leaves no room for them."""
        request, found, clock = prepared.request, prepared.found, self.clock
        device, budget_bytes = prepared.environment.device, request.budget.budget_bytes
        least = min(prepared.needs(graph) for _, graph in found.uniform.values())
        if budget_bytes is not None and budget_bytes < least:
            untimed = _cost_model(prepared, clock, others)  # refused before a step is taken
            SolverProposer(request, untimed, Target(), Trials(None), None, clock=clock).begin()
        try:
            with clock.part("measured steps"):
                return measure_op_times(
                    self.measurer,
                    found.uniform,
                    prepared.workload_key,
                    room=device.capacity_bytes - device.overhead_bytes - others,
                    host_budget=request.host_budget,
                    head=found.heads,
                    listener=clock.listener,
                    left=partial(clock.seconds_within, TIMING),
                )
        except DeviceOutOfMemory as error:
            smallest = prepared.needs(leanest(found.uniform)[1])
            raise out_of_memory("the leanest plan does not run", error.message, smallest) from None


@dataclass(kw_only=True)
class DryRun(Simulated):
    """Predict and solve for the device at hand; measure nothing. Seconds are shown where its op times are known."""

    request: SearchRequest
    clock: Clock

    def trace(self, stack: ExitStack) -> Prepared:
        found = _traced(stack, self.request, self.clock)
        device = get_device(self.request.device)
        environment = environment_to_measure_in(self.request.device)
        return _prepared(self.request, found, environment, device.used_by_others())

    def cost_model(self, prepared: Prepared, trials: Trials) -> CostModel:
        request, device, found = prepared.request, prepared.environment.device, prepared.found
        _, graph = leanest(within_host(found.uniform, device, request.host_budget))
        disk = wants_disk(found.uniform, device, request.host_budget)
        graphs = [graph, *(found.heads.graphs.values() if found.heads else [])]
        times = cached_op_times(prepared.environment, graphs, prepared.workload_key, disk=disk)
        self.terms = replace(DRY, knows_seconds=times is not None)
        if times is None:
            self.notes.append(
                "no op times of this workload are known on this device: choices were ranked by nominal rates, "
                "and no step times are given (a search without --dry-run measures them)"
            )
        with self.clock.stage("profile"):
            return _cost_model(prepared, self.clock, get_device(self.request.device).used_by_others(), times)


def _traced(stack: ExitStack, request: SearchRequest, clock: Clock) -> Traced:
    """The ghost runs of a workload on a device at hand."""
    with clock.stage("trace"):
        if request.workload is None:
            tracer = stack.enter_context(Tracer.from_step(request.step))
        else:
            device = get_device(request.device).torch_device
            tracer = stack.enter_context(Tracer.from_spec(request.workload, device=device))
        late = partial(clock.passed, TRACING)
        return traced(tracer, request.space, request.allow_inexact, listener=clock.listener, late=late)


def _prepared(request: SearchRequest, found: Traced, environment: Environment, others: int) -> Prepared:
    notes = less_than_asked(request.budget, environment)
    what_if = partial(what_if_of, request, found.uniform, environment, others)
    kind, needs = environment.device.kind, needed_on(environment)
    return Prepared.of(request, found, environment, device_name=kind, needs=needs, what_if=what_if, notes=notes)


def _cost_model(prepared: Prepared, clock: Clock, others: int, times: OpTimes | None = None) -> CostModel:
    """What choices cost by these op times; by nominal rates where none are known, good for bytes and for ranking."""
    request, environment, found = prepared.request, prepared.environment, prepared.found
    if times is None:
        heads = found.heads.graphs.values() if found.heads else ()
        lean = leanest(within_host(found.uniform, environment.device, request.host_budget))[1]
        times = nominal_op_times(environment, lean, *heads, found.uniform["save"][1])
    more = {"host_budget": request.host_budget, "listener": clock.listener, "late": partial(clock.passed, PROFILING)}
    needs = memory_at_hand(times.environment, times=times)
    return found.cost_model(times, used_by_others=others, needs=needs, **more)
