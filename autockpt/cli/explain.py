"""``autockpt explain``: where the bytes of a step go, and why a plan does what it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import DEVICE, arg, flag, opt, takes_workload, workload_spec
from autockpt.errors import InfeasibleError, UsageError

if TYPE_CHECKING:
    from autockpt.schema.explanation import Explanation


@guarded
@takes_workload
def explain(
    workload: dict[str, Any],
    plan: Path | None = arg("PLAN|RUN", "A plan file, or a run's directory. Without: the workload of --model."),
    *,
    budget: str | None = opt(
        "--budget SIZE", "Explain the plan that fits: 24GB, 60%, 60%act, auto. Default: the plan's."
    ),
    headroom: str | None = opt("--headroom SIZE", "Leave this much of it free: 2%, 500MB. Default: as for search."),
    device: str | None = DEVICE,
    hardware: str | None = opt(
        "--hardware NAME",
        "Simulate this device: rtx4090, h100, or a YAML file. Default: what the plan was simulated for.",
    ),
    limits: bool | None = opt(
        "--limits/--no-limits", "Look for the largest batch and sequence under the budget. Default: except for a run."
    ),
    ops: bool = flag("--ops", "Print every op of the step instead, tab-separated; with --json the whole graph."),
    as_json: bool = flag("--json", "Print JSON."),
) -> None:
    """Show where a step's bytes go, and what giving some up costs.

    Explains a plan; or the plan that fits a budget; or, with neither, plain training. No step is run: bytes come from
    ghost runs (whole steps on tensors without memory), seconds from op times where any are known. Options that are not
    given are those of the plan. A run is explained from its own files, unless an option asks for another job or device,
    or for --limits. Exits with 3 where nothing fits the budget, after explaining the plan with the least peak.
    """
    if plan is not None and not plan.exists():
        raise UsageError(
            f"there is no plan or run {plan}", remedy=f"Check the path; of a model: autockpt explain --model {plan}."
        )
    if ops and (budget is not None or headroom is not None or limits):
        raise UsageError(
            "--ops prints the step of a plan, or of plain training",
            remedy="Leave --budget, --headroom and --limits out, or name a plan.",
        )
    if hardware is not None and device is not None:
        raise UsageError(
            "--hardware simulates a device, --device names a local one", remedy="Leave one of the two out."
        )
    from autockpt.analysis.explain import explain as explained
    from autockpt.analysis.explain import explain_run
    from autockpt.analysis.subject import ExplainRequest, budget_for, hardware_for, step_graph
    from autockpt.schema.runs import plan_at

    loaded = plan_at(plan) if plan is not None else None
    as_planned = not (workload or device or hardware or limits or ops)
    if plan is not None and loaded is not None and as_planned:
        stored = explain_run(plan, loaded, budget, headroom)
        if stored is not None:
            _show(stored, as_json)
            return
    spec = workload_spec(workload, base=loaded.workload if loaded else None)
    card = hardware_for(hardware, device, loaded)
    question = ExplainRequest(
        spec=spec,
        plan=loaded,
        plan_path=plan,
        budget=budget_for(budget, headroom, loaded, spec, card.name if card is not None else None),
        device=device,
        hardware=card,
        limits=limits is not False,
    )
    from autockpt.cli.explain_table import print_ops
    from autockpt.progress import listener

    with listener(screen.progress()) as watcher:
        if ops:
            watcher.stage("trace")
            screen.show(step_graph(question), print_ops, as_json)
            return
        said = explained(question, watcher)
    _show(said, as_json)


def _show(said: Explanation, as_json: bool) -> None:
    """Print an explanation. Raises Exit where nothing fits its budget."""
    from autockpt.cli.explain_table import print_explanation

    screen.show(said, print_explanation, as_json)
    if said.budget is not None and said.smallest_peak > said.budget.bytes:
        raise typer.Exit(InfeasibleError.exit_code)
