"""Trace a workload with any plan: the graph of its ghost run, made in a child process that lives as long as the tracer.

``autockpt.trace`` does it in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch

from autockpt.errors import GhostError, TracingError, UsageError
from autockpt.interpreter import collection_paused
from autockpt.schema.choices import Choice
from autockpt.schema.graph import Graph, Unit
from autockpt.schema.hardware import Hardware
from autockpt.schema.plan import Plan
from autockpt.schema.run_directory import plan_at
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing.assemble import GraphSource
from autockpt.tracing.kernels.cuda_kernels import Capability
from autockpt.tracing.kernels.cuda_memory import as_seen_by, capability_of, changed, with_buckets
from autockpt.tracing.pool import MOST, GhostPool
from autockpt.tracing.process import Build, GhostProcess, NotForkable, can_fork
from autockpt.tracing.traced_run import GhostRun, capability_at
from autockpt.workload import BUCKETS, Step, preload
from autockpt.workload.units import units_setting

_IN_PROCESS = "Traced inside this process, because it uses an accelerator."
_BY_ITSELF = (
    "Neither ghosts nor a real step on the CPU could be traced. Build the model and take one training step of it in a "
    "Python process of its own, which shows whether its own code ends it."
)


class Tracer:
    """Traces a workload's whole training cycle, with or without choices attached, as often as needed.

    The workload lives as ghosts in a child process where that is possible, so that no crash can harm this one. A
    workload that cannot be ghost-run is run for real there, one cycle per trace, and its graphs say so
    (``source="recorded"``, and a note). For ``units``, ``head``, ``outside``, ``settings`` and ``notes`` see
    FirstCycle. ``view``: what graphs pass through. A context manager.
    """

    def __init__(
        self, backend: GhostPool | GhostRun, notes: tuple[str, ...] = (), view: Callable[[Graph], Graph] | None = None
    ) -> None:
        self._backend, self._notes, self._view = backend, notes, view
        self.units, self.head, self.outside, settings, self.notes = backend.first_cycle
        self.settings = dict(settings)

    @classmethod
    def from_spec(
        cls,
        spec: WorkloadSpec,
        *,
        hardware: Hardware | None = None,
        device: torch.device | str = "cpu",
        capability: Capability | None = None,
        fallback: bool = True,
        similar: Tracer | None = None,
    ) -> Tracer:
        """Build the workload of ``spec`` out of ghosts, as it would run on ``device``; no weights, no memory.

        For ``device="cuda"`` the step takes CUDA's kernels (attention, dropout, `foreach` optimizers) as a GPU of
        compute ``capability`` (default: that of the local GPU, else 8.0) would; the machine needs none. For described
        ``hardware`` it takes those of the hardware, graphs are as its memory sees them (with what is only counted by
        rules, such as ``ddp``), and the settings name what only simulated hardware follows. ``similar`` is a tracer of
        a similar workload, whose process has imported what this takes already.

        With ``fallback`` a workload that cannot be ghost-run is built for real, on the CPU in a child process; not so a
        rank of several (``shard``), as no other is there. Raises WorkloadError or UsageError where the spec cannot be
        built or its step fails, GhostError where it cannot be ghost-run and there is no fallback.
        """
        target = torch.device(device)
        view: Callable[[Graph], Graph] | None = None
        if hardware is not None:
            target, capability = torch_device(hardware), capability_of(hardware)
            view = partial(as_seen_by, hardware, spec=spec)
        elif capability is None and target.type == "cuda":
            capability = capability_at(target)  # here: the child sees no GPU
        build, tracer = (spec, target, capability), None
        if similar is not None and isinstance(similar._backend, GhostPool):
            with suppress(NotForkable, OSError):
                tracer = cls(similar._backend.with_another(build), view=view)
        if tracer is None:
            fallback, most = fallback and spec.shard is None, MOST if can_fork() else 1
            tracer = _ghost_or_recorded(lambda source: _start(source, build), fallback, view, most)
        if hardware is not None:
            tracer.settings |= spec.simulated_settings()
        return tracer

    @classmethod
    def from_step(cls, workload: Step, *, fallback: bool = True) -> Tracer:
        """Trace a live workload, whose weights, optimizer states and gradients are never touched.

        With ``fallback`` a workload on the CPU that cannot be ghost-run takes its real steps in a fork of this process.
        On an accelerator there is no such way. Raises WorkloadError where the step fails, GhostError where it cannot be
        ghost-run.
        """
        view = with_buckets if workload.settings.get("ddp") == BUCKETS else None
        try:
            return _ghost_or_recorded(
                lambda source: GhostProcess.fork(source, lambda run: run.take(workload)),
                fallback and workload.device.type == "cpu",
                view,
            )
        except NotForkable:
            return cls(in_this_process(workload), (_IN_PROCESS,), view)

    def ahead(self, plans: Iterable[Mapping[str, Choice]]) -> None:
        """Begin with plans that ``trace`` will be asked for, in parallel where there are cores for it."""
        if isinstance(self._backend, GhostPool):
            self._backend.ahead([_in_order(plan, self.units) for plan in plans])

    def trace(self, choices: Mapping[str, Choice] | None = None) -> Graph:
        """The graph of one steady-state cycle with ``choices`` (by unit name; the rest save) attached.

        Raises PlanError or ConflictError where they cannot be attached, GhostError or WorkloadError where the step
        fails.
        """
        with collection_paused():  # as all records of the graph stay
            graph = self._backend.trace(_in_order(choices or {}, self.units))
            if self._notes:
                graph = changed(graph, notes=(*self._notes, *graph.notes))
            return graph if self._view is None else self._view(graph)

    def close(self) -> None:
        """End what was started. Idempotent."""
        if isinstance(self._backend, GhostPool):
            self._backend.close()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def torch_device(hardware: Hardware) -> torch.device:
    """The torch device of described hardware. Raises UsageError where this PyTorch does not know such devices."""
    try:
        return torch.device("cuda" if hardware.kind == "rocm" else hardware.kind)
    except RuntimeError:
        raise UsageError(
            f"this PyTorch does not know {hardware.kind} devices, which {hardware.name} describes one of",
            remedy="Install the package that gives PyTorch this backend.",
        ) from None


def open_tracer(
    stack: ExitStack, hardware: Hardware | None, spec: WorkloadSpec, plan: Plan | None, device: torch.device
) -> tuple[Tracer, WorkloadSpec]:
    """A tracer, open until ``stack`` ends, and its workload; with the units that the plan names if these are others.

    ``hardware`` and ``device`` are as for ``Tracer.from_spec``.
    """
    tracer = stack.enter_context(Tracer.from_spec(spec, hardware=hardware, device=device))
    if plan is not None and spec.units is None and (named := units_setting(plan, tracer.units, tracer.head)):
        by_name = spec.model_copy(update={"units": named})
        with suppress(UsageError):  # no such modules: reported later, with a suggestion
            return stack.enter_context(Tracer.from_spec(by_name, hardware=hardware, device=device)), by_name
    return tracer, spec


def _start(source: GraphSource, build: Build) -> GhostProcess:
    if can_fork():
        preload(build[0])  # here, so that neither this child nor a later one has to
        with suppress(NotForkable):
            return GhostProcess.fork(source, lambda run: run.build(*build))
    try:
        return GhostProcess.spawn(source, build)
    except NotForkable as error:
        raise TracingError(
            f"the tracer's process could not be started: {error}", remedy="Check the limits on processes and memory."
        ) from None


def _ghost_or_recorded(
    start: Callable[[GraphSource], GhostProcess],
    fallback: bool,
    view: Callable[[Graph], Graph] | None = None,
    most: int = 1,
) -> Tracer:
    try:
        return Tracer(GhostPool(start("ghost"), most), view=view)
    except GhostError as error:
        if not fallback:
            raise
        why = error.message
    try:
        return Tracer(GhostPool(start("recorded"), 1), (f"A real step on the CPU was recorded, because {why}.",), view)
    except GhostError as error:
        own = "" if error.remedy == GhostError.default_remedy else f"{error.remedy} "
        raise TracingError(error.message, remedy=f"{own}{_BY_ITSELF}") from None


def in_this_process(workload: Step) -> GhostRun:
    """Ghost-run a copy of the workload, for processes that must not fork."""
    run = GhostRun(writable=True, threads=torch.get_num_threads())
    run.copy(workload)
    return run


def _in_order(choices: Mapping[str, Choice], units: tuple[Unit, ...]) -> dict[str, Choice]:
    """Choices in order of execution; names that are no units come last, for ``attach`` to complain about."""
    return {**{unit.name: choices[unit.name] for unit in units if unit.name in choices}, **choices}


def trace(step: Step, plan: Plan | Mapping[str, Choice] | str | Path | None = None) -> Graph:
    """Trace one whole training step of a live model, with a plan attached or without.

    ``plan`` is a Plan, the path of its file or of a run, or Choice objects by exact unit name. The model, its optimizer
    and its gradients stay as they are. The step is ghost-run where that is possible: nothing is computed, and no memory
    taken for it. Else it is recorded from a real step, and the graph says so. Raises UsageError for what is no Step,
    PlanError for a plan that does not fit the model, WorkloadError where the step fails, GhostError where a model on an
    accelerator cannot be traced without real steps.
    """
    if not isinstance(step, Step):
        raise UsageError(
            f"a {type(step).__name__} is no training step",
            remedy="Give autockpt.Step(model, batch, optimizer=optimizer); `autockpt explain --model` takes names.",
        )
    with Tracer.from_step(step) as tracer:
        if isinstance(plan, (str, Path)):
            plan = plan_at(Path(plan))
        if isinstance(plan, Plan):
            plan = plan.choices_for(tracer.units, tracer.head)
        return tracer.trace(plan)
