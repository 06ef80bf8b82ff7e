"""A search from the request to the outcome."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from autockpt.cost.roofline import environment_of_hardware
from autockpt.devices import get_device
from autockpt.errors import InfeasibleError, PlanError, RunDirectoryError, UsageError
from autockpt.measuring import LocalMeasurer, Measurer, Ranks, WorkerMeasurer
from autockpt.measuring.environment import environment_without_context
from autockpt.measuring.local import ranks_here, refuse_many_processes
from autockpt.measuring.turns import turn
from autockpt.schema.files import unwritable
from autockpt.schema.request import Listener, SearchOutcome, SearchRequest, Silence
from autockpt.schema.runs import RunDirectory
from autockpt.tuning.clock import Clock
from autockpt.tuning.compiled import Compiled, SplitProposer, refuse_uncompilable
from autockpt.tuning.infeasible import explain_refusal
from autockpt.tuning.loop import Loop, Proposer
from autockpt.tuning.opening import blocks_of
from autockpt.tuning.outcome import finish, plain
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.targets.base import Prepared, Target
from autockpt.tuning.targets.measured import Measured
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
    listener = listener or Silence()
    if request.step is not None and not request.others_wait and ranks_here() > 1:
        return _on_all_ranks(request, listener)
    if not (request.others_wait or request.quick):
        refuse_many_processes()
    refuse_unwritable(request)
    if request.workload is not None and (request.hardware is None or request.compile is not None):
        refuse_simulated(request.workload)
    if request.compile is not None:
        refuse_uncompilable(request)
    return _answered(request, listener)


def refuse_unwritable(request: SearchRequest) -> None:
    """Raise UsageError or RunDirectoryError, before anything is measured, for what could not be written afterwards."""
    if request.plan_out is not None and (why := unwritable(request.plan_out)):
        raise UsageError(f"--plan-out {request.plan_out} cannot be written: {why}", remedy="Give another file.")
    if request.out is not None and (why := unwritable(request.out / "run")):
        raise RunDirectoryError(f"--out {request.out} cannot be written: {why}", remedy="Give another folder.")


def _on_all_ranks(request: SearchRequest, listener: Listener) -> SearchOutcome:
    """The same answer on all ranks of a job: the first one searches, and all take the steps together."""
    question = json.dumps(request.question(), sort_keys=True, default=str)
    with Ranks(request.step, question, host_budget=request.host_budget) as ranks:
        if ranks.rank:  # what is written is the first rank's
            return ranks.serve().model_copy(update={"run_directory": None})
        asked = request.model_copy(update={"step": ranks.step})
        return ranks.conduct(lambda: _answered(asked, listener, ranks))


def _answered(request: SearchRequest, listener: Listener, measurer: Measurer | None = None) -> SearchOutcome:
    with ExitStack() as stack:
        outcome = _answer_on_record(request) or _search(stack, request, listener, measurer)
    return save_plan_copy(request, outcome)


def _search(
    stack: ExitStack, request: SearchRequest, listener: Listener, measurer: Measurer | None = None
) -> SearchOutcome:
    if request.hardware is None and measurer is None:
        device = get_device(request.device if request.step is None else str(request.step.device))
        stack.enter_context(turn(device, listener.note, wait=request.wait))
    clock = Clock(listener, request.timeout, request.training_steps)
    target = target_of(stack, request, clock, measurer)
    prepared = target.trace(stack)
    run = _enter_run(stack, request, prepared)
    if run is not None:
        if (known := _recorded(run, request)) is not None:
            return known
        run.write_environment(prepared.environment)
        run.write_graph(prepared.found.plain)
    trials, profiled = Trials(run), None
    try:
        profiled = target.cost_model(prepared)
        proposer: Proposer
        if profiled is not None:
            if run is not None:
                run.write_profile(profiled.profile)
            proposer = SolverProposer(prepared.request, profiled, target, trials, clock, seeds=prepared.seeds)
        else:  # steps can only be measured
            assert isinstance(target, Compiled)
            layers = [unit.name for unit in blocks_of(prepared.found.tracer)]
            room = prepared.environment.device.capacity_bytes - prepared.used_by_others
            proposer = SplitProposer(prepared.request, layers, target, trials, room=room, seeds=prepared.seeds)
        found = Loop(proposer, target, trials, request.trials, clock).run()
    except InfeasibleError as error:
        explain_refusal(error, prepared, run, profiled, clock)
        raise
    return finish(prepared, target.terms, run, profiled, proposer.known, found, clock)


def target_of(stack: ExitStack, request: SearchRequest, clock: Clock, measurer: Measurer | None = None) -> Target:
    """What the request is asked of; ``stack`` ends what measures there, unless that is the ``measurer`` of a job."""
    if request.hardware is not None:
        return OnHardware(request=request, clock=clock, hardware=request.hardware)
    if measurer is None:
        host = request.host_budget
        if (spec := request.workload) is not None:
            measurer = WorkerMeasurer(spec, request.device, host_budget=host, compile=request.compile)
        else:
            measurer = LocalMeasurer(request.step, host_budget=host, others_wait=request.others_wait)
        stack.enter_context(measurer)
    if request.compile is not None:
        return Compiled(measurer, clock, request)
    return Measured(measurer, clock, request)


# -- runs on record: a finished question is answered from its run, and a stopped search continues ----------------------


def _answer_on_record(request: SearchRequest) -> SearchOutcome | None:
    """The answer that is on record already, found without tracing; None where there is none to rely on.

    Whoever's code makes the model may have changed it, which only tracing tells; local files are compared. What it
    would run on, which may take a process of its own, is asked where a run could be the one. Raises RunDirectoryError
    where a search of this question is at work.
    """
    out, spec = request.out, request.workload
    if out is None or spec is None or spec.files is None or request.anew:
        return None
    if not (perhaps := list(RunDirectory.alike(out, request.question()))):
        return None
    if request.hardware is not None:
        environment = environment_of_hardware(request.hardware)
    else:
        environment = environment_without_context(request.device)
    question = request.question(environment)
    for run in filter(lambda run: run.may_ask(question), perhaps if environment is not None else ()):
        with run.lock():
            finished = run.finished()
            if finished is not None and (finished.files or "") == spec.files and (found := _recorded(run, request)):
                run.add_command(request.command)
                return found
    return None


def _enter_run(stack: ExitStack, request: SearchRequest, prepared: Prepared) -> RunDirectory | None:
    """The directory of this question, locked until ``stack`` ends; None where nothing is kept.

    Raises RunDirectoryError where it is another question's, corrupt or in use.
    """
    if request.out is None:
        return None
    structure: dict[str, Any] = {"model_fingerprint": fingerprint(prepared.found.tracer.units)}
    if request.step is not None:  # what tells a live step from others
        structure |= {"model": request.name, "settings": plain(prepared.settings)}
    run = RunDirectory.enter(
        request.out,
        request.question(prepared.environment, **structure),
        model=request.name,
        device=request.hardware.name if request.hardware is not None else prepared.environment.device.kind,
        budget=request.budget.text,
        fresh=request.fresh,
    )
    stack.enter_context(run.lock())
    run.add_command(request.command)
    return run


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


def _recorded(run: RunDirectory, request: SearchRequest) -> SearchOutcome | None:
    """What a run answered, if its search came to its end and no more is asked for than that; its plan's file is there.

    Raises RunDirectoryError or PlanError where that file cannot be written again.
    """
    finished = run.finished()
    if finished is None or request.anew or not finished.answers(request):
        return None
    outcome = finished.outcome
    note = f"This is the answer of {run.path}, which had ended; more --trials search on, --fresh starts over."
    if request.storage is not None:
        note += " So nothing was written to --storage: --fresh writes a study there."
    said = [note]
    if outcome.plan is not None and (put_back := run.put_back_plan(outcome.plan)):
        said.append(put_back)
    here = {"run_directory": run.path, "plan_path": run.plan_path, "set_aside": None}
    return outcome.model_copy(update={**here, "notes": (*outcome.notes, *said)})
