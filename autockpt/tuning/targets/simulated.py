"""Search for hardware that is not local: ghost runs and modelled op times in place of real steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from autockpt.cost import CostModel, said_of, simulated_memory
from autockpt.cost.roofline import environment_of_hardware
from autockpt.policies.offload import MOVING
from autockpt.schema import PlanStatus, SearchSpace
from autockpt.schema.hardware import Hardware
from autockpt.schema.request import SearchRequest
from autockpt.tracing import Tracer
from autockpt.tracing.tracer import uncollected
from autockpt.tuning.clock import Clock
from autockpt.tuning.opening import traced_for
from autockpt.tuning.targets.base import Prepared, Target
from autockpt.tuning.trials import Candidate, Score

CHECKS_OF_THE_DEEP = 8
"""Ghost runs that may be spent on refining the plan of a deep model, whose ghost runs are slow."""


@dataclass(kw_only=True)
class Simulated(Target):
    """Candidates are what their ghost runs and op times say; nothing is measured, so nothing is repeated."""

    source: PlanStatus = "simulated"
    checks: int = 20
    most_repeats: int = 4  # without noise the solver's coefficients are right from the start

    def score(self, candidate: Candidate, budget_bytes: int | None) -> Score:
        """The prediction stands."""
        return Score("simulated")


@dataclass(kw_only=True)
class OnHardware(Simulated):
    """Described hardware: no weights, no step, bytes by ghost run, seconds by roofline, and a plan that says so."""

    request: SearchRequest
    clock: Clock
    hardware: Hardware

    def trace(self, stack: ExitStack) -> Prepared:
        """A deep model is ghost-run by its shallow twin."""
        request, hardware, spec = self.request, self.hardware, self.request.described
        stack.enter_context(uncollected())
        with self.clock.stage("trace"):
            tracer = stack.enter_context(Tracer.from_spec(spec, hardware=hardware))
            space, notes = without_offload(request.space, hardware)
            more = {"inexact": request.allow_inexact, "listener": self.clock.listener}
            found = traced_for(stack, hardware, spec, tracer, space, **more)
        environment, named = environment_of_hardware(hardware), f"{hardware.name}, simulated"
        return Prepared.of(request, found, environment, [*notes, said_of(hardware)], device=named)

    def cost_model(self, prepared: Prepared) -> CostModel:
        request, found, hardware = prepared.request, prepared.found, self.hardware
        with self.clock.stage("profile"):
            times = found.roofline(hardware)
            needs = simulated_memory(hardware, request.budget.budget_bytes)
            more = {"host_budget": request.host_budget, "listener": self.clock.listener}
            cost_model = found.cost_model(times, needs=needs, **more)
        if found.twin is not None:
            self.checks = CHECKS_OF_THE_DEEP
        return cost_model


def without_offload(space: SearchSpace, hardware: Hardware) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space without choices that move bytes where that frees none, and a note on it."""
    moving = [kind for kind in space.choices if kind in MOVING]
    if not hardware.unified_memory or not moving:
        return space, ()
    note = f"not on {hardware.name}: {', '.join(moving)} (host and device share their memory)"
    return space.without(moving), (note,)
