"""Searching for hardware that is not at hand: ghost runs and modelled op times in place of real steps."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch

from autockpt.history.rundir import RunDirectory
from autockpt.profiling import Uniform, build_profile
from autockpt.profiling.roofline import roofline_times
from autockpt.schema import Budget, Graph, OpTimes, SearchOutcome, SearchRequest, format_bytes
from autockpt.schema.hardware import Hardware
from autockpt.tracing import Tracer
from autockpt.tuning.inexact import Settled, settle, units_of
from autockpt.tuning.job import Clock
from autockpt.tuning.scoring import Simulated
from autockpt.tuning.stages import find_plan, foresee_plan, job_of, kept, uniform_plans
from autockpt.workload import fingerprint

TORCH_DEVICES = {"cuda": "cuda", "rocm": "cuda", "mps": "mps", "cpu": "cpu"}


def simulate_search(request: SearchRequest, hardware: Hardware, clock: Clock) -> SearchOutcome:
    """Search for ``hardware`` by simulation alone: no weights, no step, and a plan that says so.

    Bytes are by ghost run, seconds by roofline. Writes the run's directory and plan. Raises what ``run_search`` does.
    """
    with ExitStack() as stack:
        with clock.stage("trace"):
            tracer = stack.enter_context(Tracer.from_spec(request.workload, device=torch_device(hardware)))
            uniform, space, refused = uniform_plans(tracer, request.space)
        budget, capped = within(request.budget, hardware)
        settled = Settled({}, tracer, uniform, budget)
        if request.allow_inexact:
            with clock.stage("weigh chunked_loss"):
                settled = settle(tracer, uniform, budget, space, lambda runs: modelled(hardware, runs), 0)
        job = job_of(request, tracer, settled, space, (*refused, *capped))
        job = replace(job, settings={**job.settings, "device": f"{hardware.name}, simulated"})
        units = units_of(tracer.units, tracer.head, settled.fixed)
        with clock.stage("profile"):
            times = modelled(hardware, settled.uniform)
            profiled = build_profile(settled.traces, times, settled.uniform)
        if request.dry_run:
            return kept(request, foresee_plan(job, units, profiled, clock, seconds=True))
        more = {"fixed": sorted(settled.fixed)} if settled.fixed else {}
        question = request.question(times.environment, model_fingerprint=fingerprint(tracer.units), **more)
        run = RunDirectory.enter(
            request.out,
            question,
            model=job.name,
            device=hardware.name,
            budget=request.budget.text,
            fresh=request.fresh,
        )
        stack.enter_context(run.lock())
        run.add_command(request.command)
        storage = request.storage or run.storage
        return kept(request, find_plan(job, units, profiled, Simulated(), run, storage, clock))


def torch_device(hardware: Hardware) -> torch.device:
    """The device that a step on this hardware would name."""
    return torch.device(TORCH_DEVICES[hardware.kind])


def modelled(hardware: Hardware, uniform: Uniform) -> OpTimes:
    """Op times of the hardware for all that the ghost runs of the uniform plans execute."""
    graphs: list[Graph] = [graph for _, graph in uniform.values()]
    return roofline_times(hardware, graphs)


def within(budget: Budget, hardware: Hardware) -> tuple[Budget, tuple[str, ...]]:
    """The budget, at most what the hardware has (its context is part of every peak), and a note where that is less."""
    most = hardware.memory_bytes
    if budget.kind != "bytes" or (budget.size or 0) <= most:
        return budget, ()
    note = f"{hardware.name} has {format_bytes(most)}, less than the budget: planned for what it has"
    return budget.model_copy(update={"size": most}), (note,)
