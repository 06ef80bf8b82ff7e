"""Runs on record: a finished question is answered from its run, and a stopped search continues."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from autockpt.cost.roofline import environment_of_hardware
from autockpt.errors import PlanError, RunDirectoryError, UsageError
from autockpt.measuring.environment import environment_without_context
from autockpt.schema import question_hash
from autockpt.schema.files import unwritable
from autockpt.schema.request import SearchOutcome, SearchRequest
from autockpt.schema.runs import RunDirectory
from autockpt.tuning.outcome import plain
from autockpt.tuning.targets.base import Prepared
from autockpt.workload import fingerprint


def refuse_unwritable(request: SearchRequest) -> None:
    """Raises UsageError or RunDirectoryError for places that cannot be written."""
    if request.plan_out is not None and (why := unwritable(request.plan_out)):
        raise UsageError(f"--plan-out {request.plan_out} cannot be written: {why}", remedy="Give another file.")
    if (out := _kept_in(request)) is not None and (why := unwritable(out / "run")):
        raise RunDirectoryError(f"--out {request.out} cannot be written: {why}", remedy="Give another folder.")


def answer_on_record(stack: ExitStack, request: SearchRequest) -> SearchOutcome | None:
    """The answer that is on record already, found without tracing; None where there is none to rely on.

    Until ``stack`` ends, no other search of this described question begins in its folder. Whoever's code makes the
    model may have changed it, which only tracing tells; local files are compared. What it would run on, which may take
    a process of its own, is asked where a run could be the one. Raises RunDirectoryError where a search of this
    question is at work.
    """
    out, spec = _kept_in(request), request.workload
    if out is None or spec is None:
        return None
    stack.enter_context(RunDirectory.reserved(out, request.key))
    if request.anew or spec.files is None or not (perhaps := list(RunDirectory.alike(out, request.question()))):
        return None
    if request.hardware is not None:
        environment = environment_of_hardware(request.hardware)
    else:
        environment = environment_without_context(request.device)
    if environment is None:
        return None
    question = request.question(environment)
    for run in filter(lambda run: run.may_ask(question), perhaps):
        with run.lock():
            finished = run.finished()
            if finished is None or (finished.files or "") != spec.files:
                continue
            if (outcome := _recorded(run, request)) is not None:
                run.add_command(request.command)
                return outcome
    return None


def enter_run(
    stack: ExitStack, request: SearchRequest, prepared: Prepared
) -> tuple[RunDirectory | None, SearchOutcome | None]:
    """The directory of this question, locked until ``stack`` ends; None where nothing is kept.

    With what it answers already, where a search of this question came to its end. Raises RunDirectoryError where it is
    another question's, corrupt or in use.
    """
    if (out := _kept_in(request)) is None:
        return None, None
    environment, found = prepared.environment, prepared.found
    live: dict[str, Any] = {}  # what tells a live step from others
    if request.step is not None:
        live = {"model": request.name, "settings": plain(prepared.settings)}
    run = RunDirectory.enter(
        out,
        request.question(environment, model_fingerprint=fingerprint(found.tracer.units), **live),
        model=request.name,
        device=prepared.device_name,
        budget=request.budget.text,
        fresh=request.fresh,
    )
    stack.enter_context(run.lock())
    run.add_command(request.command)
    known = _recorded(run, request)
    if known is None:
        run.write_environment(environment)
        run.write_graph(found.plain)
    return run, known


def study_title(prepared: Prepared, run: RunDirectory | None) -> str:
    """What a run's study is called. No other run has a study of that name in a storage that several share."""
    request, device = prepared.request, prepared.environment.device.name
    digest = f" ({question_hash(run.question)}-{run.id})" if run is not None else ""
    return f"{request.name} on {device} within {request.budget.text}{digest}"


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


def _kept_in(request: SearchRequest) -> Path | None:
    """The folder that keeps the run; None where nothing is kept."""
    return None if request.dry_run else request.out


def _recorded(run: RunDirectory, request: SearchRequest) -> SearchOutcome | None:
    """What a run answered, if its search came to its end and no more is asked for than that; its plan's file is there.

    Raises RunDirectoryError or PlanError where that file cannot be written again.
    """
    finished = run.finished()
    if finished is None or request.anew or not finished.answers(request):
        return None
    outcome = finished.outcome
    note = f"This is the answer of {run.path}, where the search had ended; --again, or more --trials, searches on."
    if request.storage is not None:
        note += " So nothing was written to --storage: --again writes the study there."
    said = [note]
    if outcome.plan is not None and (put_back := run.put_back_plan(outcome.plan)):
        said.append(put_back)
    here = {"run_directory": run.path, "plan_path": run.plan_path, "set_aside": None}
    return outcome.model_copy(update={**here, "notes": (*outcome.notes, *said)})
