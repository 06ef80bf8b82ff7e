"""A search from the request to the outcome."""

from __future__ import annotations

import json
from contextlib import ExitStack

from autockpt.cost import CostModel
from autockpt.devices import get_device
from autockpt.errors import InfeasibleError
from autockpt.measuring import LocalMeasurer, Measurer, Ranks, WorkerMeasurer
from autockpt.measuring.local import ranks_here, refuse_many_processes
from autockpt.measuring.turns import turn
from autockpt.schema.request import Listener, SearchOutcome, SearchRequest, Silence
from autockpt.tuning.infeasible import explain_refusal
from autockpt.tuning.loop import Loop, Proposer
from autockpt.tuning.opening import blocks_of
from autockpt.tuning.outcome import finish
from autockpt.tuning.proposers.solver import SolverProposer
from autockpt.tuning.proposers.splits import SplitProposer
from autockpt.tuning.question import Clock
from autockpt.tuning.record import answer_on_record, enter_run, refuse_unwritable, save_plan_copy, study_title
from autockpt.tuning.targets.base import Prepared, Target
from autockpt.tuning.targets.compiled import Compiled, refuse_uncompilable
from autockpt.tuning.targets.measured import DryRun, Measured
from autockpt.tuning.targets.simulated import OnHardware
from autockpt.tuning.trials import Trials
from autockpt.workload import refuse_simulated


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
        if ranks.rank:
            return ranks.serve()
        asked = request.model_copy(update={"step": ranks.step})
        return ranks.conduct(lambda: _search(asked, listener, ranks))


def _search(request: SearchRequest, listener: Listener | None, measurer: Measurer | None = None) -> SearchOutcome:
    listener = listener or Silence()
    with ExitStack() as stack:
        if (answer := answer_on_record(stack, request)) is not None:  # found without tracing
            return save_plan_copy(request, answer)
        if request.hardware is None and not request.dry_run and measurer is None:
            device = get_device(request.device if request.step is None else str(request.step.device))
            stack.enter_context(turn(device, listener.note, wait=request.wait))
        clock = Clock(listener, request.timeout, request.training_steps)
        target = target_of(stack, request, clock, measurer)
        prepared = target.trace(stack)
        run, answer = enter_run(stack, request, prepared)
        if answer is not None:
            return save_plan_copy(request, answer)
        trials, profiled = Trials(run), None
        storage = None if run is None else request.storage or run.storage
        try:
            profiled = target.cost_model(prepared, trials)
            proposer = _proposer(prepared, profiled, target, trials, storage, study_title(prepared, run), clock)
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
        assert isinstance(measurer, WorkerMeasurer)
        return Compiled(measurer, clock, request=request, mode=request.compile, within=measurer.within)
    return Measured(measurer, clock, request=request)


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
    refuse_unwritable(request)
    if request.workload is not None and (request.hardware is None or request.compile is not None):
        refuse_simulated(request.workload)
    if request.compile is not None:
        refuse_uncompilable(request)
