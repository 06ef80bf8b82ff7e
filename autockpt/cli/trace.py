"""``autockpt trace``: what a training step holds in memory, unit by unit and over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import takes_workload, workload_spec

if TYPE_CHECKING:
    from autockpt.schema import Graph, WorkloadSpec


@guarded
@takes_workload
def trace(
    workload: dict[str, Any],
    *,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="PLAN", help="Trace with this plan applied.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="For weights and batch.")] = 0,
    ops: Annotated[bool, typer.Option("--ops", help="Print every op instead, tab-separated.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --ops the whole graph, too.")] = False,
) -> None:
    """Show what a training step holds in memory.

    The whole step is recorded without running it: no weights, no arithmetic, no GPU. Prints per unit the bytes that its
    forward leaves for backward, the bytes of its inputs and its FLOPs; then bytes over time, with the peak's place and
    owner.
    """
    spec = workload_spec(workload, seed=seed)
    graph, settings = _trace(spec, plan)
    if as_json:
        _print_json(graph, settings, ops)
        return
    from autockpt.report import print_ops, print_summary, summarise

    console = screen.results()
    if ops:
        print_ops(graph, console)
    else:
        print_summary(summarise(graph), {"model": spec.model} | settings, console)


def _trace(spec: WorkloadSpec, plan: Path | None) -> tuple[Graph, dict[str, Any]]:
    from autockpt.schema import Plan

    loaded = Plan.load(plan) if plan is not None else None
    from autockpt.tracing import Tracer

    with screen.progress().status("tracing …"), Tracer.from_spec(spec) as tracer:
        choices = None
        if loaded is not None:
            choices = loaded.choices_for(tracer.units, tracer.head)
        graph = tracer.trace(choices)
        settings = dict(tracer.settings) | ({"plan": f"{plan} ({loaded.status})"} if loaded else {})
        return graph.model_copy(update={"notes": (*tracer.notes, *graph.notes)}), settings


def _print_json(graph: Graph, settings: dict[str, Any], whole: bool) -> None:
    import json

    from autockpt.report import summarise

    data: dict[str, Any] = {"settings": settings, "summary": summarise(graph).model_dump(mode="json")}
    if whole:
        data["graph"] = graph.model_dump(mode="json")
    screen.print_json(json.dumps(data, indent=None if whole else 2, default=str))
