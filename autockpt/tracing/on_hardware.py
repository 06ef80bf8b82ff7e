"""Tracers for hardware that need not be at hand."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import torch

from autockpt.errors import UsageError
from autockpt.schema import Hardware, Plan, WorkloadSpec
from autockpt.tracing.kernels.cuda_memory import as_seen_by, capability_of
from autockpt.tracing.tracer import Tracer
from autockpt.workload.units import units_named


def torch_device(hardware: Hardware) -> torch.device:
    """The device that a step on this hardware would name. Raises UsageError where this PyTorch does not know it."""
    try:
        return torch.device("cuda" if hardware.kind == "rocm" else hardware.kind)
    except RuntimeError:
        raise UsageError(
            f"this PyTorch does not know {hardware.kind} devices, which {hardware.name} describes one of",
            remedy="Install the package that gives PyTorch this backend.",
        ) from None


def tracer_for(
    hardware: Hardware | None,
    spec: WorkloadSpec,
    *,
    device: torch.device | str = "cpu",
    fallback: bool = True,
    beside: Tracer | None = None,
) -> Tracer:
    """A tracer of the workload with the kernels of the hardware, whose graphs are as its memory sees them, and whose
    settings say what only simulated hardware follows. Without hardware: as on ``device``, which is at hand.

    ``fallback`` and ``beside`` as for ``Tracer.from_spec``. Raises what ``Tracer.from_spec`` does.
    """
    if hardware is None:
        return Tracer.from_spec(spec, device=device, fallback=fallback, beside=beside)
    tracer = Tracer.from_spec(
        spec,
        device=torch_device(hardware),
        capability=capability_of(hardware),
        fallback=fallback,
        view=lambda graph: as_seen_by(hardware, graph, spec),
        beside=beside,
    )
    tracer.settings |= spec.simulated_settings()
    return tracer


def open_tracer(
    stack: ExitStack,
    hardware: Hardware | None,
    spec: WorkloadSpec,
    plan: Plan | None = None,
    *,
    device: torch.device | str = "cpu",
) -> tuple[Tracer, WorkloadSpec]:
    """A tracer, open until ``stack`` ends, by the units that a plan names where the model's own are others.

    With the workload by these units. ``hardware`` and ``device`` as for ``tracer_for``.
    """
    tracer = stack.enter_context(tracer_for(hardware, spec, device=device))
    if plan is not None and spec.units is None and (named := units_named(plan, tracer.units, tracer.head)):
        by_name = spec.model_copy(update={"units": named})
        with suppress(UsageError):  # names of no module: said later, with what was meant perhaps
            return stack.enter_context(tracer_for(hardware, by_name, device=device)), by_name
    return tracer, spec
