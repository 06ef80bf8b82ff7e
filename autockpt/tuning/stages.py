"""The stages that every search goes through, whether it measures or simulates."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from autockpt.devices import said_of_host
from autockpt.errors import InfeasibleError, PlanError
from autockpt.history.rundir import RunDirectory
from autockpt.profiling import CostModel, forget_op_times
from autockpt.schema import SAVE, Budget, Choice, Comparison, Environment, Plan, PlanStatus, Trial, format_bytes
from autockpt.schema.known import ALL
from autockpt.schema.outlook import Outlook
from autockpt.schema.request import FinishedSearch, SearchOptions, SearchOutcome, SearchRequest, StageTime
from autockpt.schema.step_note import step_note
from autockpt.tuning.loop import Loop, SearchResult
from autockpt.tuning.opening import Opened, Traced
from autockpt.tuning.outcome import make_plan, plain, said_of_head, scored_rows, without_seconds
from autockpt.tuning.outlook import ghost_runs, look_around, trade
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.question import Question
from autockpt.tuning.targets.base import Target
from autockpt.tuning.trials import Trials
from autockpt.workload import fingerprint

OFF = 3.0
"""Steps that take so many times as long as op times tell, or so many times less, are not those that were timed."""


def less_than_asked(budget: Budget, environment: Environment) -> tuple[str, ...]:
    """A note where the device has less than the budget, and so is what plans are held against."""
    device = environment.device
    if budget.kind != "bytes" or (budget.size or 0) <= device.capacity_bytes:
        return ()
    return (f"{device.name} has {format_bytes(device.capacity_bytes)}, less than the budget: planned for what it has",)


def question_of(request: SearchRequest, found: Traced, budget: Budget, notes: Sequence[str] = ()) -> Question:
    """The question of a described workload, with what became known of it."""
    seeds, doubts = _seeds(request, found)
    return Question.of(
        request,
        name=request.workload.model,
        spec=request.workload,
        settings=dict(found.tracer.settings),
        budget=budget,
        space=found.space,
        notes=(*request.notes, *found.said, *notes, *doubts),
        seeds=seeds,
    )


def _seeds(request: SearchRequest, found: Traced) -> tuple[dict[str, dict[str, Choice]], tuple[str, ...]]:
    """The plan to start from, with choices for units that are planned for. Raises PlanError for another model's."""
    tracer = found.tracer
    plan = request.start
    if plan is None:
        return {}, ()
    blocks = [u.name for u in tracer.units if u.role == "block"]
    heads = found.heads
    chosen = {n: c for n, c in plan.choices_for(tracer.units, tracer.head).items() if c != SAVE}
    kept = {n: c for n, c in chosen.items() if n in blocks or (heads and n == heads.unit.name and c in heads.graphs)}
    left_out = sorted(set(chosen) - set(kept))
    notes = (f"of the plan to start from, {', '.join(left_out)} was left out",) if left_out else ()
    return {f"{plan.status} plan": {**dict.fromkeys(blocks, SAVE), **kept}}, notes


def save_plan_copy(request: SearchRequest, outcome: SearchOutcome) -> SearchOutcome:
    """The outcome, its plan written where the request wants it besides."""
    if request.plan_out is None or outcome.plan is None:
        return outcome
    try:
        set_aside = outcome.plan.save(request.plan_out, existing="set_aside")
    except PlanError as error:
        where = f"It is kept in {outcome.plan_path}." if outcome.plan_path else error.remedy
        raise PlanError(error.message, remedy=where) from None
    return outcome.model_copy(update={"plan_path": request.plan_out, "set_aside": set_aside})


def enter_run(
    stack: ExitStack, asked: SearchOptions, opened: Opened, **facts: Any
) -> tuple[RunDirectory, SearchOutcome | None]:
    """The directory of this question, locked until ``stack`` ends; ``facts`` tell it from others of the same words.

    With what it answers already, where a search of this question came to its end. Raises RunDirectoryError where it is
    another question's, corrupt or in use.
    """
    assert asked.out is not None
    question, environment, found = opened.question, opened.environment, opened.found
    run = RunDirectory.enter(
        asked.out,
        asked.question(environment, model_fingerprint=fingerprint(found.tracer.units), **facts),
        model=question.name,
        device=opened.device or environment.device.kind,
        budget=asked.budget.text,
        fresh=asked.fresh,
    )
    stack.enter_context(run.lock())
    run.add_command(asked.command)
    known = recorded(run, asked)
    if known is None:
        run.write_environment(environment)
        run.write_graph(found.plain)
    return run, known


def recorded(run: RunDirectory, asked: SearchOptions) -> SearchOutcome | None:
    """What a run answered, if its search came to its end and no more is asked for than that; its plan's file is there.

    Raises RunDirectoryError or PlanError where that file cannot be written again.
    """
    finished = run.finished()
    if finished is None or asked.anew or not finished.answers(asked):
        return None
    outcome = finished.outcome
    note = f"This is the answer of {run.path}, where the search had ended; --again, or more --trials, searches on."
    if isinstance(asked, SearchRequest) and asked.storage is not None:
        note += " So nothing was written to --storage: --again writes the study there."
    said = [note]
    if outcome.plan is not None and (put_back := run.put_back_plan(outcome.plan)):
        said.append(put_back)
    here = {"run_directory": run.path, "plan_path": run.plan_path, "set_aside": None}
    return outcome.model_copy(update={**here, "notes": (*outcome.notes, *said)})


def conclude(
    opened: Opened,
    found: SearchResult,
    rows: tuple[Comparison, ...],
    plan: Plan | None,
    *,
    source: PlanStatus,
    stages: Sequence[StageTime],
) -> SearchOutcome:
    """What people get of a search, on record."""
    question, run = opened.question, opened.run
    outcome = SearchOutcome(
        plan=plan,
        source=source,
        budget=found.budget,
        device=opened.environment.device,
        rows=rows,
        settings=plain(question.settings),
        binding=found.binding,
        interrupted=found.interrupted,
        resumed=found.resumed,
        measured_trials=sum(t.score is not None or source == "simulated" for t in found.trials),
        stopped=found.stopped,
        run_directory=run.path if run else None,
        plan_path=run.plan_path if run and plan else None,
        set_aside=run.set_aside if run else None,
        smallest_peak=found.smallest_peak,
        step_note=step_note(opened.environment, question.spec),
        stages=tuple(stages),
        notes=(*question.notes, *found.notes),
    )
    if run is None or found.interrupted or plan is None:
        return outcome
    before = None if question.continued else run.finished()
    if before is not None and before.outcome.plan is not None and before.outcome.plan.hash != plan.hash:
        note = _changed(before.outcome.plan, plan, found)
        outcome = outcome.model_copy(update={"notes": (*outcome.notes, note)})
    files = question.spec.files if question.spec is not None else None
    clock = opened.clock
    limits = {"trials": question.trials, "timeout": clock.asked_timeout, "training_steps": clock.training_steps}
    run.write_finished(FinishedSearch(files=files, outcome=outcome, **limits))
    return outcome


def _changed(before: Plan, now: Plan, found: SearchResult) -> str:
    """Which plan was named before, which one is named now, and why."""
    trials = {t.plan_hash: t for t in found.trials}
    old, new = trials.get(before.hash or ""), trials.get(now.hash or "")
    why = "side by side again it was the faster one"
    if old is None or not old.feasible:
        why = "the earlier one does not hold the budget any more"
    elif new is not None and new.number >= found.resumed:
        why = "it was tried only now"

    def said(plan: Plan, trial: Trial | None) -> str:
        seconds = f" ({trial.score_seconds:.4g} s)" if trial is not None and trial.score is not None else ""
        return f"{plan.hash}{seconds}"

    return f"the verdict changed: it was {said(before, old)} and is {said(now, new)} now, because {why}"


def refuse_hopeless(opened: Opened, profiled: CostModel) -> None:
    """Raises InfeasibleError for a budget in bytes that no plan fits, by bytes alone: ``profiled`` may be untimed."""
    with refusal_on_record(opened.run):
        target, trials = Target(), Trials(None)
        SolverProposer(opened.question, profiled, target, trials, None, clock=opened.clock).begin()


def find_plan(opened: Opened, profiled: CostModel, target: Target) -> SearchOutcome:
    """Search a profiled workload and write the plan; ``target`` says what is measured. Raises InfeasibleError."""
    question, environment, clock, run = opened.question, opened.environment, opened.clock, opened.run
    head = opened.found.tracer.head
    if run is not None:
        run.write_profile(profiled.profile)
    trials = Trials(run)
    with refusal_on_record(run, profiled):
        more = {"study": opened.title, "clock": clock}
        proposer = SolverProposer(question, profiled, target, trials, opened.storage, **more)
        found = Loop(proposer, target, trials, question.trials, clock).run()
    if target.terms.knows_seconds and (pace := _pace(found)) is not None:
        forget_op_times(environment, question.workload_key)
        found.notes.append(
            f"steps took {pace:.2g} times as long as op times predicted: other work ran on the machine, now or when "
            "these were measured. The search went by its own steps; the next one measures op times anew"
        )
    rows = scored_rows(proposer.known, found.trials, found.best, question.host_budget)
    rows = rows if target.terms.knows_seconds else without_seconds(rows)
    plan = None
    if found.best is not None:
        found.notes.extend(said_of_head(head, found.best.choices))
        if (score := found.best.score or found.best.predicted) is not None:
            found.notes.extend(said_of_host(environment, score.host_bytes, question.host_budget))
        notes = (*question.notes, *found.notes) if target.terms.source == "simulated" else found.notes
        plan = make_plan(opened, found.best.choices, found.budget, source=target.terms.source, rows=rows, notes=notes)
        if run is not None:
            run.write_plan(plan)
            run.write_graph(profiled.predictor.graph(found.best.choices), "plan")
            if ALL in proposer.known and clock.seconds_left > 0:
                run.write_graph(profiled.predictor.graph(proposer.known[ALL]), "recompute")
            if not found.interrupted and clock.seconds_left > 0:
                with clock.stage("other budgets"):
                    run.write_outlook(look_around(profiled, found, head, run.outlook(), clock))
        if found.binding and (offer := trade(found.best, found.trials, run and run.outlook(), found.budget.bytes)):
            found.notes.append(offer)
    return conclude(opened, found, rows, plan, source=target.terms.source, stages=clock.stages)


def _pace(found: SearchResult) -> float | None:
    """How long the first steps took, relative to what op times predicted; None where about so long, or not known."""
    paces = [
        t.measured.step_seconds / t.predicted.step_seconds
        for t in found.trials[found.resumed :]
        if t.measured and t.predicted and t.predicted.step_seconds
    ]
    pace = statistics.median(paces[:3] or [1.0])
    return None if 1 / OFF <= pace <= OFF else pace


@contextmanager
def refusal_on_record(run: RunDirectory | None, profiled: CostModel | None = None) -> Iterator[None]:
    """That nothing fits is an answer, too: the run says so, and whoever finds alternatives can add them."""
    try:
        yield
    except InfeasibleError as error:
        if run is not None:
            plans = ghost_runs(profiled) if profiled is not None else ()
            run.write_outlook(Outlook(plans=plans, infeasible=error.message))
            error.run = run
        raise
