"""The doors of a search: ``run_search`` for a described workload, ``search_step`` for a live one in this process."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

from pydantic import ValidationError

from autockpt.errors import RunDirectoryError, UsageError
from autockpt.history.rundir import RunDirectory
from autockpt.measuring.environment import environment_without_context
from autockpt.measuring.local import refuse_many_processes
from autockpt.schema import Budget, SearchSpace, parse_budget, parse_size
from autockpt.schema.base import unfit
from autockpt.schema.files import unwritable
from autockpt.schema.request import TRIALS, Listener, SearchOptions, SearchOutcome, SearchRequest, Silence
from autockpt.tuning.outcome import plain
from autockpt.tuning.question import Clock
from autockpt.tuning.stages import enter_run, recorded, save_plan_copy
from autockpt.tuning.targets.compiled import open_compiled
from autockpt.tuning.targets.measured import open_live, open_measured
from autockpt.tuning.targets.simulated import open_simulated, simulated_environment
from autockpt.workload import Step
from search_spaces.spaces import load_space


def run_search(request: SearchRequest, listener: Listener | None = None) -> SearchOutcome:
    """Search for the workload that ``request`` describes; steps are measured in a worker process.

    With ``request.compile`` these steps are compiled. Where ``request.hardware`` is given, nothing is measured: the
    search is simulated for it. Writes the run's directory and plan. Raises UsageError (under a distributed launch as
    well), WorkloadError, InfeasibleError, RunDirectoryError or MeasurementError; whatever was measured until then is
    kept. Ctrl-C ends the search with the best plan so far.
    """
    refuse_many_processes()
    _refuse_unwritable(request)
    with nullcontext() if request.dry_run else RunDirectory.reserved(request.out, request.key):
        outcome = _answered(request) or search_described(request, Clock(listener or Silence(), request.timeout))
        return save_plan_copy(request, outcome)


def _answered(request: SearchRequest) -> SearchOutcome | None:
    """The answer that is on record already, found without tracing; None where there is none to rely on.

    Whoever's code makes the model may have changed it, which only tracing tells; local files are compared. What it
    would run on, which may take a process of its own, is asked where a run could be the one. Raises RunDirectoryError
    where a search of this question is at work.
    """
    files = request.workload.files
    if request.dry_run or request.anew or files is None:
        return None
    perhaps = list(RunDirectory.alike(request.out, request.question()))
    environment = None
    if perhaps and request.hardware is not None:
        environment = simulated_environment(request.hardware)
    elif perhaps:
        environment = environment_without_context(request.device)
    if environment is None:
        return None
    question = request.question(environment)
    for run in filter(lambda run: run.may_ask(question), perhaps):
        with run.lock():
            finished = run.finished()
            if finished is None or (finished.files or "") != files:
                continue
            if (outcome := recorded(run, request)) is not None:
                run.add_command(request.command)
                return outcome
    return None


def search_described(request: SearchRequest, clock: Clock, *, alternatives: bool = True) -> SearchOutcome:
    """Search where the request wants it: by compiled steps, by simulation, or by real steps. Raises as ``run_search``.

    Writes the run's directory and plan, but for a dry run. Without ``alternatives`` a simulation that nothing fits
    looks for no changes that would.
    """
    with ExitStack() as stack:
        if request.compile is not None:
            opened = open_compiled(stack, request, request.compile, clock)
        elif request.hardware is not None:
            opened = open_simulated(stack, request, request.hardware, clock, alternatives=alternatives)
        else:
            opened = open_measured(stack, request, clock)
        if request.dry_run:
            return opened.answer().model_copy(update={"dry_run": True})
        run, known = enter_run(stack, request, opened)
        return known or opened.answer(run, request.storage)


def _refuse_unwritable(request: SearchRequest) -> None:
    """What cannot be written at the end is refused at the start."""
    if request.plan_out is not None and (why := unwritable(request.plan_out)):
        raise UsageError(f"--plan-out {request.plan_out} cannot be written: {why}", remedy="Give another file.")
    if not request.dry_run and (why := unwritable(request.out / "run")):
        raise RunDirectoryError(f"--out {request.out} cannot be written: {why}", remedy="Give another folder.")


def search_options(
    *,
    budget: str | Budget,
    headroom: str | None = None,
    host_budget: str | int | None = None,
    space: str | SearchSpace = "knobs",
    trials: int = TRIALS,
    timeout: float | None = None,
    simulated: bool = False,
    **more: Any,
) -> SearchOptions:
    """Options of a search from what people write, ``more`` among them. Raises UsageError for what makes no sense.

    ``budget`` is text such as "24GB", "60%", "60%act" or "auto"; ``headroom`` (text: "2%" of the budget, or "500MB") is
    left free of it, by default as ``Budget.with_headroom`` says. ``host_budget`` (text such as "8GB", or bytes) bounds
    what offloading may claim of host memory, in the search and wherever the plan is applied.
    """
    if isinstance(host_budget, str):
        host_budget = parse_size(host_budget)
    elif isinstance(host_budget, bool) or (host_budget is not None and host_budget <= 0):
        raise UsageError(
            f"a host budget of {host_budget!r} bytes allows nothing", remedy='Write it as "8GB" or "8GiB".'
        )
    asked = {
        "budget": parse_budget(budget).with_headroom(headroom, simulated=simulated),
        "host_budget": host_budget,
        "space": load_space(space) if isinstance(space, str) else space,
        "trials": trials,
        "timeout": timeout,
        **more,
    }
    try:
        return SearchOptions.model_validate(asked)
    except ValidationError as error:
        raise unfit(error, "See help(autockpt.search).") from None


def search_step(
    step: Step,
    asked: SearchOptions,
    listener: Listener | None = None,
    *,
    others_wait: bool = False,
) -> SearchOutcome:
    """Search for a live training step, in this process: a second copy of the model might not fit.

    Weights, buffers, optimizer, scaler, gradients and random state are the caller's again afterwards, bit for bit,
    after Ctrl-C too. A search that came to its end in ``asked.out`` is answered from its record, unless ``asked.again``
    or more trials are asked for. With ``others_wait`` this is one of several processes, whose step needs no other
    (DDP's inner model), and all others wait.

    Raises UsageError under a distributed launch, WorkloadError for a step that does not run, InfeasibleError where
    nothing fits. The outcome has no plan where Ctrl-C came before anything fitting was measured.
    """
    clock = Clock(listener or Silence(), asked.timeout, asked.training_steps)
    with ExitStack() as stack:
        opened = open_live(stack, step, asked, clock, others_wait=others_wait)
        if asked.out is None:
            return opened.answer()
        question = opened.question
        run, known = enter_run(stack, asked, opened, model=question.name, settings=plain(question.settings))
        return known or opened.answer(run)
