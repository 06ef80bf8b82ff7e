"""Our plan at a budget: an ordinary search, with what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autockpt.schema import (
    CompileMode,
    Listener,
    ResolvedBudget,
    SearchOutcome,
    SearchRequest,
    dump_choices,
    parse_budget,
)
from autockpt.schema.bench import BenchRequest, SearchCost
from autockpt.tuning import run_search
from autockpt.tuning.targets.base import COMPILING, STEPS


def search_for(
    request: BenchRequest, budget: ResolvedBudget, out: Path, listener: Listener, compile: CompileMode | None = None
) -> tuple[dict[str, Any], SearchCost]:
    """The choices of the plan that a search finds within so many bytes, as JSON, and what finding it took.

    ``compile``: the plan is for steps that are compiled in this way. Raises InfeasibleError where nothing fits,
    KeyboardInterrupt where the search was interrupted.
    """
    outcome = run_search(
        SearchRequest(
            budget=parse_budget(f"{budget.bytes // 1000}KB"),  # the finest unit that a budget can be written in
            workload=request.workload,
            space=request.space,
            device=request.device,
            trials=request.trials,
            seed=request.seed,
            out=out,
            compile=compile,
            fresh=request.fresh,
            command=request.command,
        ),
        listener,
    )
    if outcome.interrupted:
        raise KeyboardInterrupt
    assert outcome.plan is not None  # where nothing fits the search has raised that
    return dump_choices(outcome.plan.expand_planned()), _cost(outcome)


def _cost(outcome: SearchOutcome) -> SearchCost:
    parts = {stage.name: stage.seconds for stage in outcome.stages if stage.part}
    return SearchCost(
        trials=outcome.measured_trials,
        seconds=sum(stage.seconds for stage in outcome.stages if not stage.part),
        measured_seconds=parts.get(STEPS, 0.0),
        compile_seconds=parts.get(COMPILING, 0.0),
    )
