"""A search from the request to the outcome."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from autockpt.cost import CostModel
from autockpt.cost.roofline import environment_of_hardware
from autockpt.devices import get_device
from autockpt.errors import InfeasibleError, PlanError, RunDirectoryError, UsageError
from autockpt.measuring import LocalMeasurer, Measurer, Ranks, WorkerMeasurer
from autockpt.measuring.environment import environment_without_context
from autockpt.measuring.local import ranks_here, refuse_many_processes
from autockpt.measuring.turns import turn
from autockpt.schema import question_hash
from autockpt.schema.files import unwritable
from autockpt.schema.request import Listener, SearchOutcome, SearchRequest, Silence
from autockpt.schema.runs import RunDirectory
from autockpt.tuning.clock import Clock
from autockpt.tuning.infeasible import explain_refusal
from autockpt.tuning.loop import Loop, Proposer
from autockpt.tuning.opening import blocks_of
from autockpt.tuning.outcome import finish, plain
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.proposers.splits import SplitProposer
from autockpt.tuning.targets.base import Prepared, Target
from autockpt.tuning.targets.compiled import Compiled, refuse_uncompilable
from autockpt.tuning.targets.measured import DryRun, Measured
from autockpt.tuning.targets.simulated import OnHardware
from autockpt.tuning.trials import Trials
from autockpt.workload import fingerprint, refuse_simulated


def run_search(request: SearchRequest, listener: Listener | None = None) -> SearchOutcome:
    """Search for the workload that ``request`` describes, by steps in a worker process, or for its live step in this.

    A second copy of a live model might not fit: its weights, buffers, optimizer, scaler, gradients and random state are
    the caller's again afterwards, bit for bit, after Ctrl-C too. With ``request.compile`` steps are compiled; where
    ``request.hardware`` is given, nothing is measured. Writes the run's directory and plan, where ``request.out`` says;
    a search that came to its end there is answered from its record. Ctrl-C ends a search with the best plan so far, or
    without one where nothing fitting was measured.

    Raises UsageError (under a distributed launch as well), WorkloadError, InfeasibleError, RunDirectoryError or
    MeasurementError; whatever was measured until then is kept.
    """
    if request.step is not None and not request.others_wait and ranks_here() > 1:
        return _on_all_ranks(request, listener)
    _refuse(request)
    return _search(request, listener)


def _on_all_ranks(request: SearchRequest, listener: Listener | None) -> SearchOutcome:
    """The same answer on all ranks of a job: the first one searches, and all take the steps together."""
    question = json.dumps(request.question(), sort_keys=True, default=str)
    with Ranks(request.step, question, host_budget=request.host_budget) as ranks:
        if ranks.rank:  # what is written is the first rank's
            return ranks.serve().model_copy(update={"run_directory": None})
        asked = request.model_copy(update={"step": ranks.step})
        return ranks.conduct(lambda: _search(asked, listener, ranks))


def _search(request: SearchRequest, listener: Listener | None, measurer: Measurer | None = None) -> SearchOutcome:
    listener = listener or Silence()
    with ExitStack() as stack:
        if (answer := _answer_on_record(stack, request)) is not None:  # found without tracing
            return save_plan_copy(request, answer)
        if request.hardware is None and not request.dry_run and measurer is None:
            device = get_device(request.device if request.step is None else str(request.step.device))
            stack.enter_context(turn(device, listener.note, wait=request.wait))
        clock = Clock(listener, request.timeout, request.training_steps)
        target = target_of(stack, request, clock, measurer)
        prepared = target.trace(stack)
        run, answer = _enter_run(stack, request, prepared)
        if answer is not None:
            return save_plan_copy(request, answer)
        trials, profiled = Trials(run), None
        storage = None if run is None else request.storage or run.storage
        try:
            profiled = target.cost_model(prepared, trials)
            proposer = _proposer(prepared, profiled, target, trials, storage, _study_title(prepared, run), clock)
            if run is not None and profiled is not None:
                run.write_profile(profiled.profile)
            found = Loop(proposer, target, trials, request.trials, clock).run()
        except InfeasibleError as error:
            explain_refusal(error, request, prepared, run, profiled, clock)
            raise
        outcome = finish(request, prepared, target.terms, run, profiled, proposer.known, found, clock)
        return save_plan_copy(request, outcome)


def target_of(stack: ExitStack, request: SearchRequest, clock: Clock, measurer: Measurer | None = None) -> Target:
    """What the request is asked of; ``stack`` ends what measures there, unless that is the ``measurer`` of a job."""
    if request.hardware is not None:
        return OnHardware(request=request, clock=clock, hardware=request.hardware)
    if request.dry_run:
        return DryRun(request=request, clock=clock)
    if measurer is None:
        measurer = stack.enter_context(measurer_of(request))
    if request.compile is not None:
        return Compiled(measurer, clock, request, mode=request.compile)
    return Measured(measurer, clock, request)


def measurer_of(request: SearchRequest) -> Measurer:
    """What measures a request's steps: a worker process, or for a live step this one."""
    if request.workload is None:
        return LocalMeasurer(request.step, host_budget=request.host_budget, others_wait=request.others_wait)
    return WorkerMeasurer(request.workload, request.device, host_budget=request.host_budget, compile=request.compile)


def _proposer(
    prepared: Prepared,
    profiled: CostModel | None,
    target: Target,
    trials: Trials,
    storage: str | None,
    name: str,
    clock: Clock,
) -> Proposer:
    """The solver's plans where choices have known costs; else splits of the layers, of which the target is asked."""
    request, seeds = prepared.request, prepared.seeds
    if profiled is not None:
        return SolverProposer(request, profiled, target, trials, storage, seeds=seeds, study=name, clock=clock)
    assert isinstance(target, Compiled)
    layers = [unit.name for unit in blocks_of(prepared.found.tracer)]
    return SplitProposer(request, layers, target, trials, room=target.room(), seeds=seeds)


def _refuse(request: SearchRequest) -> None:
    """What cannot be searched for, or not be written at the end, is refused at the start."""
    if not request.others_wait and not (request.dry_run and request.hardware is not None):
        refuse_many_processes()
    _refuse_unwritable(request)
    if request.workload is not None and (request.hardware is None or request.compile is not None):
        refuse_simulated(request.workload)
    if request.compile is not None:
        refuse_uncompilable(request)


# -- runs on record: a finished question is answered from its run, and a stopped search continues ----------------------


def _refuse_unwritable(request: SearchRequest) -> None:
    """Raises UsageError or RunDirectoryError for places that cannot be written."""
    if request.plan_out is not None and (why := unwritable(request.plan_out)):
        raise UsageError(f"--plan-out {request.plan_out} cannot be written: {why}", remedy="Give another file.")
    if (out := _kept_in(request)) is not None and (why := unwritable(out / "run")):
        raise RunDirectoryError(f"--out {request.out} cannot be written: {why}", remedy="Give another folder.")


def _answer_on_record(stack: ExitStack, request: SearchRequest) -> SearchOutcome | None:
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


def _enter_run(
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


def _study_title(prepared: Prepared, run: RunDirectory | None) -> str:
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
