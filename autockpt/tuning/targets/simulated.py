"""The target that takes no step: ghost runs and op times simulate described hardware, or the local device."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from autockpt.cost import CostModel, cached_op_times, local_memory, memory_note, simulated_memory
from autockpt.cost.roofline import environment_of_hardware
from autockpt.interpreter import collection_paused
from autockpt.policies.offload import MOVING
from autockpt.schema import SAVE, Choice, OpTimes, Plan, Remake, SearchSpace, Selective
from autockpt.schema.hardware import Hardware
from autockpt.tracing import open_tracer
from autockpt.tuning.clock import Clock
from autockpt.tuning.targets.base import Prepared, Target
from autockpt.tuning.traced_model import device_of, local_device, trace_for_hardware, trace_model, tracer_of
from autockpt.tuning.trials import Candidate, Result


@dataclass
class Simulated(Target):
    """Scores candidates by their predictions.

    Op times come from a roofline of described hardware; for the local device from an earlier search, else from nominal
    rates, which only rank choices. The menus also have the choices of a ``plan`` that is to be explained.
    """

    clock: Clock
    plan: Plan | None = None
    choices: dict[str, Choice] = field(default_factory=dict, init=False)  # the plan's, by unit

    def trace(self, stack: ExitStack) -> Prepared:
        """Ghost-run the step; for described hardware a shallow twin stands for a deep model.

        Raises PlanError for a plan that does not fit the model.
        """
        request, hardware, plan = self.request, self.request.hardware, self.plan
        stack.enter_context(collection_paused())
        self.clock.listener.stage("trace")
        if request.workload is None:
            tracer = stack.enter_context(tracer_of(request))
        else:
            tracer, spec = open_tracer(stack, hardware, request.workload, plan, device_of(request).torch_device)
            request = request.model_copy(update={"workload": spec})
        self.choices = {} if plan is None else plan.choices_for(tracer.units, tracer.head)
        of_head = SAVE if tracer.head is None else self.choices.get(tracer.head.name, SAVE)
        more = {"inexact": request.allow_inexact, "of_head": of_head, "listener": self.clock.listener}
        if hardware is None:
            traced = trace_model(tracer, request.space, **more)
            environment, used_by_others = local_device(request)
            return Prepared.of(request, traced, environment, used_by_others=used_by_others)
        space, notes = without_offload(request.space, hardware)
        traced = trace_for_hardware(stack, hardware, request.described, tracer, space, **more)
        environment, named = environment_of_hardware(hardware), f"{hardware.name}, simulated"
        return Prepared.of(request, traced, environment, [*notes, memory_note(hardware)], device=named)

    def cost_model(self, prepared: Prepared) -> CostModel:
        """Build it with the choices of the plan besides those of the search space."""
        request, traced, budget_bytes = prepared.request, prepared.traced, prepared.request.budget.budget_bytes
        self.clock.listener.stage("profile")
        if request.hardware is not None:
            times, memory = traced.roofline(request.hardware), simulated_memory(request.hardware, budget_bytes)
        else:
            times = self._local_times(prepared)
            memory = local_memory(times.environment, budget_bytes, times)
        more = {"host_budget": request.host_budget, "listener": self.clock.listener}
        menus = traced.space.choices
        own = [c for c in self.choices.values() if isinstance(c, Selective | Remake) or c.kind in {*MOVING} - {*menus}]
        more |= {"memory": memory, "extra": dict.fromkeys(own), "used_by_others": prepared.used_by_others}
        return traced.cost_model(times, **more)

    def _local_times(self, prepared: Prepared) -> OpTimes:
        """Op times of an earlier search of this workload on the local device, else nominal ones."""
        traced, key = prepared.traced, prepared.workload_key
        lean = (traced.uniform.get("recompute") or traced.uniform["save"])[1]  # it has every op that is timed
        if (cached := cached_op_times(prepared.environment, [lean, *traced.of_heads], key)) is not None:
            return cached
        return traced.nominal(prepared.environment)

    def evaluate(self, candidate: Candidate, budget_bytes: int | None) -> Result:
        """No step is taken: the trial's score is its prediction."""
        return Result("simulated")


def without_offload(space: SearchSpace, hardware: Hardware) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space without choices that offload, and a note, where host and device share their memory."""
    moving = [kind for kind in space.choices if kind in MOVING]
    if not hardware.unified_memory or not moving:
        return space, ()
    note = f"Not on {hardware.name}: {', '.join(moving)} (host and device share their memory)."
    return space.without(moving), (note,)
