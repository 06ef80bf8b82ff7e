"""Turn the result of the loop into the outcome: the plan, the rows of the answer, and the run's files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autockpt.cost import CostModel, forget_op_times
from autockpt.cost.roofline import waits_for_host
from autockpt.devices import host_notes
from autockpt.schema import SAVE, PlanStatus, ResolvedBudget, Trial, Unit, format_bytes
from autockpt.schema.baselines import OURS
from autockpt.schema.plan import Comparison, Plan, Verdict
from autockpt.schema.request import FinishedSearch, SearchOutcome
from autockpt.schema.run_directory import RunDirectory
from autockpt.schema.words import counted, step_note
from autockpt.tuning.loop import Loop
from autockpt.tuning.outlook import look_around, trade
from autockpt.tuning.targets.base import Prepared
from autockpt.tuning.targets.compiled import NOT_PREDICTED
from autockpt.tuning.trials import Trials

OFF = 3.0
"""Factor between measured and predicted steps beyond which the cached op times are taken for wrong."""
_VERDICTS: dict[str, Verdict] = {"measured": "fits", "over_budget": "over_budget", "out_of_memory": "out_of_memory"}


def finish(prepared: Prepared, run: RunDirectory | None, cost_model: CostModel | None, loop: Loop) -> SearchOutcome:
    """Assemble the answer from the finished loop, and write it to ``run``.

    ``cost_model`` is None where nothing is predicted.
    """
    asked, environment, best = prepared.request, prepared.environment, loop.best
    source: PlanStatus = "measured" if asked.measures else "simulated"
    target, trials, baselines, clock = loop.target, loop.trials.all, loop.proposer.baselines, loop.clock
    notes = [*target.notes, *loop.trials.notes]
    if cost_model is not None and not loop.trials.nominal and (pace := _pace(loop.trials)) is not None:
        forget_op_times(environment, prepared.workload_key)
        notes.append(
            f"Steps took {pace:.2g} times as long as op times predicted: other work ran on the machine, now or when "
            "these were measured. The search went by its own steps; the next one measures op times again."
        )
    scored = [t for t in trials if t.score is not None or not asked.measures]
    tried = [(name, trial) for name, plan in baselines.items() if (trial := loop.trials.find(plan)) is not None]
    tried += [(OURS, best)] if best is not None else []
    rows = tuple(_row(name, trial, asked.host_budget, loop.trials.nominal) for name, trial in tried)
    plan = None
    if best is not None:
        notes.extend(_plan_notes(best, prepared.traced.tracer.head))
        if (score := best.score or best.predicted) is not None:
            notes.extend(host_notes(environment, score.host_bytes, asked.host_budget))
        if asked.hardware is not None and cost_model is not None:
            notes.extend(waits_for_host(asked.hardware, cost_model.predictor.graph(best.choices)))
        plan = _plan(prepared, best, loop.budget, source, rows, notes)
        if run is not None:
            run.write_plan(plan)
            if cost_model is not None:  # for the page and `explain`, as far as time allows
                run.write_graph(cost_model.predictor.graph(best.choices), "plan")
                if not loop.interrupted and clock.seconds_left > 0:
                    run.write_outlook(look_around(cost_model, loop, run.outlook()))
        if loop.binding and (offer := trade(best, trials, run and run.outlook(), loop.budget.bytes)):
            notes.append(offer)
    outcome = SearchOutcome(
        plan=plan,
        source=source,
        budget=loop.budget,
        device=environment.device,
        rows=rows,
        settings=plain(prepared.settings),
        binding=loop.binding,
        interrupted=loop.interrupted,
        resumed=sum(t.number < loop.trials.resumed for t in scored),
        measured_trials=len(scored),
        stopped=loop.stopped,
        run_directory=run.path if run else None,
        plan_path=run.plan_path if run and plan else None,
        set_aside=run.set_aside if run else None,
        smallest_peak=loop.proposer.smallest_peak,
        step_note=step_note(environment, asked.workload),
        seconds=clock.elapsed,
        notes=(*asked.notes, *notes),
    )
    if run is not None and plan is not None and not loop.interrupted:
        limits = {"trials": asked.trials, "timeout": asked.timeout, "training_steps": asked.training_steps}
        run.write_finished(FinishedSearch(outcome=outcome, **limits))
    return outcome


def _plan(
    prepared: Prepared,
    best: Trial,
    budget: ResolvedBudget,
    source: PlanStatus,
    rows: Sequence[Comparison],
    notes: Sequence[str],
) -> Plan:
    """The plan with its provenance. The head is listed only if it has a choice; the last of ``rows`` is the plan's."""
    asked, tracer, spec = prepared.request, prepared.traced.tracer, prepared.request.spec
    head, settings = tracer.head, plain(prepared.settings)
    chosen = head is not None and best.choices.get(head.name, SAVE) != SAVE
    if spec is not None and (named := settings.get("units")):  # so that the cuts need not be found again
        spec = spec.model_copy(update={"units": named})
    assumed = asked.notes if source == "simulated" else ()
    return Plan.create(
        best.choices,
        [*tracer.units, head] if chosen and head is not None else tracer.units,
        model=asked.name,
        source=source,
        workload=spec,
        settings=settings,
        environment=prepared.environment,
        budget=budget,
        host_budget_bytes=asked.host_budget,
        predicted=rows[-1].predicted,
        measured=rows[-1].measured,
        baselines=tuple(rows[:-1]),
        notes=(*assumed, *notes, *((NOT_PREDICTED,) if asked.compile is not None else ())),
    ).model_copy(update={"compile": asked.compile})


def _plan_notes(best: Trial, head: Unit | None) -> Iterator[str]:
    """Notes on the plan: whether gradients are exact, and how many graphs its steps were compiled to."""
    if head is not None and (choice := best.choices.get(head.name, SAVE)) != SAVE:
        bits = "bit-equal with plain training's" if choice.exact else "equal to plain training's only up to rounding"
        yield f"The output head runs with `{head.name}: {choice}`: gradients are {bits}."
    tiled = sum(
        bool(getattr(choice, "tiles", 1) > 1)
        for name, choice in best.choices.items()
        if head is None or name != head.name
    )
    if tiled:
        yield f"{counted(tiled, 'layer')} with `tiles`: gradients are equal to plain training's only up to rounding."
    if best.measured is not None and (graphs := best.measured.graphs):
        compiled_to = "one graph and its backward" if graphs == 1 else f"{graphs} graphs and their backwards"
        yield f"The plan's steps are compiled to {compiled_to}."


def _pace(trials: Trials) -> float | None:
    """The first measured steps as a multiple of the predicted ones; None within ``OFF``, or where unknown."""
    paces = [
        t.measured.step_seconds / t.predicted.step_seconds
        for t in trials.all[trials.resumed :]
        if t.measured and t.predicted and t.predicted.step_seconds
    ]
    pace = statistics.median(paces[:3] or [1.0])
    return None if 1 / OFF <= pace <= OFF else pace


def plain(settings: Mapping[str, Any]) -> dict[str, str | int | float | bool | None]:
    """Settings as data: values of other types as text."""
    return {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in settings.items()}


def _row(name: str, trial: Trial, host_budget: int | None, nominal: bool) -> Comparison:
    """A row of the answer's table. Predicted seconds are left out where nothing was timed."""
    verdict: Verdict = _VERDICTS.get(trial.state, "not_measured")
    predicted, note = trial.predicted, ""
    if predicted is not None and host_budget is not None and predicted.host_bytes > host_budget:
        needs, has = format_bytes(predicted.host_bytes), format_bytes(host_budget)
        verdict, note = "over_budget", f"not measured: it needs {needs} of host memory, the host budget is {has}"
    elif trial.state == "failed":
        note = trial.message
    if predicted is not None and nominal:
        predicted = predicted.model_copy(update={"step_seconds": None})
    return Comparison(
        name=name,
        verdict=verdict,
        predicted=predicted,
        measured=trial.measured,
        plan_hash=trial.plan_hash,
        note=note,
    )
