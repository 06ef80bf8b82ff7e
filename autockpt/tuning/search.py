"""One search, from the request to the outcome.

``_search`` is the main path: target, tracing, run directory, cost model, proposer, loop, outcome.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from autockpt.cost.roofline import environment_of_hardware
from autockpt.errors import InfeasibleError, PlanError, RunDirectoryError, UsageError
from autockpt.measuring import LocalMeasurer, Measurer, Ranks, WorkerMeasurer
from autockpt.measuring.device_lock import device_lock
from autockpt.measuring.environment import environment_without_context
from autockpt.measuring.local import ranks_here, refuse_many_processes
from autockpt.schema import Environment, Listener, SearchOutcome, SearchRequest, Silence
from autockpt.schema.baselines import ALL
from autockpt.schema.files import unwritable
from autockpt.schema.run_directory import RunDirectory, directory_name, short_name
from autockpt.tuning.clock import Clock
from autockpt.tuning.infeasible import explain_refusal
from autockpt.tuning.loop import Loop, Proposer
from autockpt.tuning.outcome import finish, plain
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.proposers.split import SplitProposer
from autockpt.tuning.targets.base import Prepared, Target
from autockpt.tuning.targets.compiled import Compiled, refuse_uncompilable
from autockpt.tuning.targets.measured import Measured
from autockpt.tuning.targets.simulated import Simulated
from autockpt.tuning.traced_model import blocks_of, device_of
from autockpt.tuning.trials import Trials
from autockpt.workload import fingerprint, refuse_simulated

FEWEST = 3  # candidates of a search, where several jobs share the trials


def run_search(request: SearchRequest, listener: Listener | None = None) -> SearchOutcome:
    """Run the search: in a worker process for a described workload, in this process for a live step.

    A live model is not copied, since a second copy might not fit. Its weights, buffers, optimizer, scaler, gradients
    and random state are restored bit for bit afterwards, after Ctrl-C too. With ``request.compile`` steps are compiled;
    with ``request.hardware`` or ``simulate`` nothing is measured. The run's directory and plan are written to
    ``request.out``; a search that is finished there is answered from its record. Ctrl-C ends a search with the best
    plan so far, if any.

    Raises UsageError (under a distributed launch as well), WorkloadError, InfeasibleError, RunDirectoryError or
    MeasurementError; what was measured until then is kept.
    """
    listener = listener or Silence()
    if request.step is not None and request.measures and not request.others_wait and ranks_here() > 1:
        return _on_all_ranks(request, listener)
    if not request.others_wait and (request.measures or request.out is not None):
        refuse_many_processes()
    refuse_unwritable(request)
    if request.workload is not None and (request.measures or request.compile is not None):
        refuse_simulated(request.workload)
    if request.compile is not None:
        refuse_uncompilable(request)
    return _cached_or_searched(request, listener)


def refuse_unwritable(request: SearchRequest) -> None:
    """Raises UsageError or RunDirectoryError where the answer could not be written, before anything is measured."""
    if request.plan_out is not None and (why := unwritable(request.plan_out)):
        raise UsageError(f"--plan-out {request.plan_out} cannot be written: {why}", remedy="Give another file.")
    if request.out is not None and (why := unwritable(request.out / "run")):
        raise RunDirectoryError(f"--out {request.out} cannot be written: {why}", remedy="Give another folder.")


def _on_all_ranks(request: SearchRequest, listener: Listener) -> SearchOutcome:
    """Search on the first rank of a job, with steps that all ranks take together. Every rank returns the answer."""
    question = json.dumps(request.question(), sort_keys=True, default=str)
    with Ranks(request.step, question, host_budget=request.host_budget) as ranks:
        if ranks.rank:  # only the first rank writes
            return ranks.serve().model_copy(update={"run_directory": None})
        asked = request.model_copy(update={"step": ranks.step})
        return ranks.conduct(lambda: _cached_or_searched(asked, listener, ranks))


def _cached_or_searched(request: SearchRequest, listener: Listener, measurer: Measurer | None = None) -> SearchOutcome:
    """Answer from the record, or search."""
    with ExitStack() as stack:
        outcome = _cached_outcome(request) or _search(stack, request, listener, measurer)
    return save_plan_copy(request, outcome)


def _search(
    stack: ExitStack, request: SearchRequest, listener: Listener, measurer: Measurer | None = None
) -> SearchOutcome:
    """Search from the target to the outcome; ``stack`` closes what is opened on the way."""
    if request.measures:  # on several ranks the first one's device stands for all of them
        stack.enter_context(device_lock(device_of(request), listener.note, wait=request.wait))
    clock = Clock(listener, request.timeout, request.training_steps)
    target = target_of(stack, request, clock, measurer)
    prepared = target.trace(stack)
    run = _enter_run(stack, request, prepared)
    if run is not None:
        if (known := _outcome_of(run, request)) is not None:
            return known
        run.write_environment(prepared.environment)
        run.write_graph(prepared.traced.plain)
    trials, cost_model = Trials(run, clock), None
    try:
        cost_model = target.cost_model(prepared)
        proposer: Proposer
        if cost_model is not None:
            if run is not None:
                run.write_profile(cost_model.profile)
            proposer = SolverProposer(prepared.request, cost_model, target, trials, prepared.seeds)
            if run is not None and ALL in proposer.baselines:  # for the page; ghost-run as a baseline
                run.write_graph(cost_model.predictor.graph(proposer.baselines[ALL]), "recompute")
        else:  # steps can only be measured
            assert isinstance(target, Compiled)
            layers = [unit.name for unit in blocks_of(prepared.traced.tracer)]
            room = prepared.environment.device.capacity_bytes - prepared.used_by_others
            proposer = SplitProposer(prepared.request, layers, target, trials, room=room, seeds=prepared.seeds)
        loop = Loop(proposer, target, trials)
        loop.run()
    except InfeasibleError as error:
        explain_refusal(error, prepared, run, cost_model, clock)
        raise
    return finish(prepared, run, cost_model, loop)


def target_of(stack: ExitStack, request: SearchRequest, clock: Clock, measurer: Measurer | None = None) -> Target:
    """Create the target; ``stack`` closes its measurer, unless that is the ``measurer`` of a job."""
    if not request.measures:
        return Simulated(request, clock)
    if measurer is None:
        host = request.host_budget
        if (spec := request.workload) is not None:
            measurer = WorkerMeasurer(spec, request.device, host_budget=host, compile=request.compile)
        else:
            measurer = LocalMeasurer(request.step, host_budget=host, others_wait=request.others_wait)
        stack.enter_context(measurer)
    if request.compile is not None:
        return Compiled(request, clock, measurer)
    return Measured(request, clock, measurer)


# -- earlier runs: a finished search is answered from its record, an unfinished one continues -------------------------


def _cached_outcome(request: SearchRequest) -> SearchOutcome | None:
    """The outcome of an earlier, finished search of the same question, found without tracing; None if there is none.

    User code may have changed since, which only tracing detects. So only workloads whose files are known are answered
    this way. The environment is looked up only if there are runs of the model, as that may take a process of its own.
    Raises RunDirectoryError where a search of this question is running.
    """
    out, spec = request.out, request.workload
    if out is None or spec is None or spec.files is None or request.ignores_record:
        return None
    if not any(out.glob(f"{short_name(request.name)}_*")):
        return None
    if request.hardware is not None:
        environment = environment_of_hardware(request.hardware)
    else:
        environment = environment_without_context(request.device)
    if environment is None:
        return None
    path, question = _asked(request, environment)
    if not path.exists():
        return None
    run = RunDirectory.enter(path, question)
    with run.lock():
        if (known := _outcome_of(run, request)) is not None:
            run.add_command(request.command)
    return known


def _enter_run(stack: ExitStack, request: SearchRequest, prepared: Prepared) -> RunDirectory | None:
    """Open or create the run directory of this question, locked until ``stack`` ends; None where nothing is kept.

    Raises RunDirectoryError where it belongs to another question, is corrupt or in use.
    """
    if request.out is None:
        return None
    structure = dict[str, Any]()
    if request.workload is None or request.workload.files is None:  # code decides what the model is
        structure["model_fingerprint"] = fingerprint(prepared.traced.tracer.units)
    if request.step is not None:  # which nothing else identifies
        structure |= {"model": request.name, "settings": plain(prepared.settings)}
    run = RunDirectory.enter(*_asked(request, prepared.environment, **structure), fresh=request.fresh)
    stack.enter_context(run.lock())
    run.add_command(request.command)
    return run


def _asked(request: SearchRequest, environment: Environment, **structure: Any) -> tuple[Path, dict[str, Any]]:
    """The directory of the request's run, and the question that it answers."""
    assert request.out is not None
    question = request.question(environment, **structure)
    device = request.hardware.name if request.hardware is not None else environment.device.kind
    return request.out / directory_name(request.name, device, request.budget.text, question), question


def save_plan_copy(request: SearchRequest, outcome: SearchOutcome) -> SearchOutcome:
    """Write the plan to ``request.plan_out`` as well, if given."""
    if request.plan_out is None or outcome.plan is None:
        return outcome
    try:
        set_aside = outcome.plan.save(request.plan_out)
    except PlanError as error:
        where = f"It is kept in {outcome.plan_path}." if outcome.plan_path else error.remedy
        raise PlanError(error.message, remedy=where) from None
    return outcome.model_copy(update={"plan_path": request.plan_out, "set_aside": set_aside})


def _outcome_of(run: RunDirectory, request: SearchRequest) -> SearchOutcome | None:
    """The outcome of a finished run, unless the request asks for more; restores its plan's file.

    Raises RunDirectoryError or PlanError where that file cannot be written.
    """
    finished = run.finished()
    if finished is None or request.ignores_record or not finished.answers(request):
        return None
    outcome = finished.outcome
    more = "more --trials search on, " if request.measures else ""
    note = f"This is the answer of {run.path}, which had ended; {more}--fresh starts over."
    if request.storage is not None:
        note += " So nothing was written to --storage: --fresh writes a study there."
    if outcome.plan is not None and not run.has_written(outcome.plan):
        run.write_plan(outcome.plan)
    here = {"run_directory": run.path, "plan_path": run.plan_path, "set_aside": run.set_aside}
    return outcome.model_copy(update={**here, "notes": (*outcome.notes, note)})
