"""``autockpt trace``: what a training step holds in memory, unit by unit and over time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import flag, named_hardware, opt, takes_workload, workload_spec

if TYPE_CHECKING:
    from autockpt.schema import DevicePeak, Graph, Hardware, Plan, WorkloadSpec


@guarded
@takes_workload
def trace(
    workload: dict[str, Any],
    *,
    plan: Path | None = opt("--plan PLAN|RUN", "Trace with this plan applied, or the run's."),
    hardware: str | None = opt("--hardware NAME", "Trace for this device: rtx4090, h100, …, or a YAML file."),
    seed: int = opt("--seed N", "For weights and batch.", default=0, min=0),
    ops: bool = flag("--ops", "Print every op instead, tab-separated."),
    as_json: bool = flag("--json", "Print JSON; with --ops the whole graph, too."),
) -> None:
    """Show what a training step holds in memory.

    The whole step is recorded without running it: no weights, no arithmetic, no GPU. Prints per unit the bytes that its
    forward leaves for backward, the bytes of its inputs and its FLOPs; then bytes over time, with the peak's place and
    owner. With --hardware the step takes that device's kernels, and what its allocator reserves is shown as well. With
    --plan options that are not given are those that the plan was made with.
    """
    from autockpt.history.trialplan import plan_at

    loaded = plan_at(plan) if plan is not None else None
    spec = workload_spec(workload, base=loaded.workload if loaded is not None else None, seed=seed)
    device = named_hardware(hardware)
    if device is None:
        from autockpt.workload import refuse_simulated

        refuse_simulated(spec)
    from autockpt.reporting.progress import listener

    with listener(screen.progress(), f"trace {spec.model}") as watcher:
        watcher.stage("trace")
        graph, settings = _trace(spec, loaded, device)
    peak = None
    if device is not None:
        from autockpt.hardware.cuda_memory import device_peak

        peak = device_peak(device, graph)
    if as_json:
        _print_json(graph, settings, ops, peak)
        return
    from autockpt.reporting.trace_view import print_device_peak, print_ops, print_summary, summarise

    console = screen.results()
    if ops:
        print_ops(graph, console)
    else:
        print_summary(summarise(graph), {"model": spec.model} | settings, console)
        if peak is not None and device is not None:
            print_device_peak(peak, device.name, device.memory_bytes, console)


def _trace(spec: WorkloadSpec, loaded: Plan | None, hardware: Hardware | None) -> tuple[Graph, dict[str, Any]]:
    from autockpt.tracing import open_tracer

    with ExitStack() as stack:
        tracer, _ = open_tracer(stack, hardware, spec, loaded)
        graph = tracer.trace(loaded.choices_for(tracer.units, tracer.head) if loaded is not None else None)
        settings = dict(tracer.settings)
        settings |= {"device": f"{hardware.name}, simulated"} if hardware else {}
        settings |= {"plan": f"{loaded.file} ({loaded.status})"} if loaded else {}
        return graph.model_copy(update={"notes": (*tracer.notes, *graph.notes)}), settings


def _print_json(graph: Graph, settings: dict[str, Any], whole: bool, peak: DevicePeak | None) -> None:
    import json

    from autockpt.reporting.trace_view import summarise

    data: dict[str, Any] = {"settings": settings, "summary": summarise(graph).model_dump(mode="json")}
    if peak is not None:
        data["device_peak"] = peak.model_dump(mode="json") | {"total": peak.total, "fragmentation": peak.fragmentation}
    if whole:
        data["graph"] = graph.model_dump(mode="json")
    screen.print_json(json.dumps(data, indent=None if whole else 2, default=str))
