"""The stages that every search goes through, whether it measures or simulates."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from autockpt.errors import PlanError, UsageError
from autockpt.history.rundir import RunDirectory
from autockpt.profiling import Heads, Profiled, Traces, Uniform, head_graphs, uniform_graphs
from autockpt.schema import (
    SAVE,
    Budget,
    Choice,
    Comparison,
    DeviceInfo,
    Environment,
    Graph,
    Plan,
    PlanStatus,
    SearchOutcome,
    SearchRequest,
    SearchSpace,
    StageTime,
    Unit,
    parse_choice,
)
from autockpt.schema.choices import ChunkedLoss
from autockpt.tracing import Tracer
from autockpt.tuning.candidates import REFEREE_CALLS
from autockpt.tuning.dryrun import foresee
from autockpt.tuning.engine import Engine, Found
from autockpt.tuning.job import Clock, Job, Limits
from autockpt.tuning.outcome import listed_units, make_plan, plain, said_of_head, scored_rows, simulated_rows
from autockpt.tuning.scoring import Scorer
from autockpt.workload import fingerprint

CHUNKS = (256, 1024, 4096)
"""Tokens of a chunk, where head and loss run in chunks: fewer hold fewer logits, more keep a device busier."""


@dataclass(frozen=True)
class Traced:
    """Ghost runs that a search begins with, and the space without choices that the model refuses.

    ``uniform`` are plans with one choice on every layer, ``heads`` those with a choice on the output head alone. With a
    ``twin``, a shallow model that stands for a deep one, they are of that; ``base`` is the whole model's plain step.
    """

    tracer: Tracer
    uniform: Uniform
    heads: Heads | None
    space: SearchSpace
    notes: tuple[str, ...] = ()
    twin: Traces | None = None
    base: Graph | None = None


def traced(tracer: Tracer, space: SearchSpace, inexact: bool, notes: Sequence[str] = ()) -> Traced:
    """Ghost-run what a search begins with. Raises UsageError for a model without blocks to choose for."""
    uniform, space, refused = uniform_plans(tracer, space)
    if inexact and tracer.head is None:
        refused = (*refused, "--allow-inexact changes nothing: the model has no output head")
    heads = head_graphs(tracer, tracer.head, head_choices(space, inexact))
    return Traced(tracer, uniform, heads, space, (*notes, *refused))


def head_choices(space: SearchSpace, inexact: bool) -> tuple[Choice, ...]:
    """What the output head may do besides saving."""
    chunked = (ChunkedLoss(tokens=tokens) for tokens in CHUNKS)
    return (*map(parse_choice, space.head), *(chunked if inexact else ()))


def uniform_plans(tracer: Tracer, space: SearchSpace) -> tuple[Uniform, SearchSpace, tuple[str, ...]]:
    """Ghost runs of the uniform plans, the space without choices that the model refuses, and a note on those.

    Raises UsageError for a model without blocks to choose for.
    """
    uniform = uniform_graphs(tracer, blocks_of(tracer), space.choices)
    return uniform, *allowed(space, uniform)


def blocks_of(tracer: Tracer) -> tuple[Unit, ...]:
    """The blocks to choose for. Raises UsageError where there are none."""
    blocks = tuple(u for u in tracer.units if u.role == "block")
    if not blocks:
        raise UsageError(
            "the model has no repeated blocks, so there is nothing to choose per layer",
            remedy="autockpt plans for members of an nn.ModuleList or nn.Sequential, and for transformers' layers.",
        )
    return blocks


def allowed(space: SearchSpace, uniform: Uniform) -> tuple[SearchSpace, tuple[str, ...]]:
    """The space without choices that have no ghost run, because the model refuses them, and a note on those."""
    refused = [kind for kind in space.choices if kind not in uniform]
    if not refused:
        return space, ()
    note = f"not for this model: {', '.join(refused)} (apply such a plan to see why)"
    return space.restricted((*uniform, *space.head)), (note,)


def job_of(request: SearchRequest, found: Traced, budget: Budget, notes: Sequence[str] = ()) -> Job:
    """The question of a described workload, with what became known of it."""
    tracer = found.tracer
    seeds, doubts = _seeds(request, found)
    return Job(
        name=request.workload.model,
        spec=request.workload,
        settings=dict(tracer.settings),
        notes=(
            *request.notes,
            *tracer.notes,
            *(found.base or found.uniform["save"][1]).notes,
            *found.notes,
            *notes,
            *doubts,
        ),
        budget=budget,
        space=found.space,
        limits=Limits(request.trials, request.timeout, request.seed),
        host_budget=request.host_budget,
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


def kept(request: SearchRequest, outcome: SearchOutcome) -> SearchOutcome:
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
    stack: ExitStack,
    request: SearchRequest,
    job: Job,
    environment: Environment,
    units: Sequence[Unit],
    *,
    device: str | None = None,
) -> RunDirectory:
    """The directory of this question, locked until ``stack`` ends; ``device`` names it (default: the device's kind).

    Raises RunDirectoryError where it is another question's, corrupt or in use.
    """
    run = RunDirectory.enter(
        request.out,
        request.question(environment, model_fingerprint=fingerprint(units)),
        model=job.name,
        device=device or environment.device.kind,
        budget=request.budget.text,
        fresh=request.fresh,
    )
    stack.enter_context(run.lock())
    run.add_command(request.command)
    return run


def outcome_of(
    job: Job,
    found: Found,
    rows: tuple[Comparison, ...],
    plan: Plan | None,
    device: DeviceInfo,
    run: RunDirectory | None,
    *,
    source: PlanStatus,
    stages: Sequence[StageTime],
    notes: Sequence[str],
) -> SearchOutcome:
    """What people get of a search; ``notes`` are its own, after those of the job."""
    return SearchOutcome(
        plan=plan,
        source=source,
        budget=found.budget,
        device=device,
        rows=rows,
        settings=plain(job.settings),
        binding=found.binding,
        interrupted=found.interrupted,
        resumed=found.resumed,
        measured_trials=sum(t.score is not None or source == "simulated" for t in found.trials),
        stopped=found.stopped,
        run_directory=run.path if run else None,
        plan_path=run.plan_path if run and plan else None,
        set_aside=run.set_aside if run else None,
        smallest_peak=found.smallest_peak,
        stages=tuple(stages),
        notes=(*job.notes, *notes),
    )


def find_plan(
    job: Job,
    tracer: Tracer,
    profiled: Profiled,
    scorer: Scorer,
    run: RunDirectory | None,
    storage: str,
    clock: Clock,
    *,
    referee_calls: int = REFEREE_CALLS,
) -> SearchOutcome:
    """Search a profiled workload and write the plan; ``scorer`` says what is measured. Raises InfeasibleError.

    ``referee_calls`` are the ghost runs that may be spent on refining one candidate.
    """
    environment = profiled.profile.op_times.environment
    if run is not None:
        run.write_environment(environment)
        run.write_graph(profiled.base)
        run.write_profile(profiled.profile)
    engine = Engine(
        profiled=profiled,
        scorer=scorer,
        budget=job.budget,
        space=job.space,
        limits=job.limits,
        run=run,
        storage=storage,
        clock=clock,
        seeds=job.seeds,
        referee_calls=referee_calls,
    )
    found = engine.run()
    rows = scored_rows(engine.known, found.trials, found.best, job.host_budget)
    plan = None
    if found.best is not None:
        found.notes.extend(said_of_head(tracer.head, found.best.choices))
        notes = (*job.notes, *found.notes) if scorer.source == "simulated" else found.notes
        plan = make_plan(
            job,
            found.best.choices,
            listed_units(tracer.units, tracer.head, found.best.choices),
            environment,
            found.budget,
            source=scorer.source,
            rows=rows,
            notes=notes,
            host_budget=job.host_budget,
        )
        if run is not None:
            run.write_plan(plan)
    return outcome_of(
        job,
        found,
        rows,
        plan,
        environment.device,
        run,
        source=scorer.source,
        stages=clock.stages,
        notes=found.notes,
    )


def foresee_plan(job: Job, tracer: Tracer, profiled: Profiled, clock: Clock, *, seconds: bool) -> SearchOutcome:
    """The solver's plan and what ghost runs say of it and of the well-known ones; nothing is tried or written.

    ``seconds``: whether op times are good for more than ranking. Raises InfeasibleError.
    """
    with clock.stage("solve"):
        foreseen = foresee(profiled, job.budget, job.space)
    environment = profiled.profile.op_times.environment
    notes = (*job.notes, *said_of_head(tracer.head, foreseen.choices))
    rows = simulated_rows(foreseen.predictions, seconds=seconds, host_budget=job.host_budget)
    return SearchOutcome(
        plan=make_plan(
            job,
            foreseen.choices,
            listed_units(tracer.units, tracer.head, foreseen.choices),
            environment,
            foreseen.budget,
            source="simulated",
            rows=rows,
            notes=notes,
            host_budget=job.host_budget,
        ),
        source="simulated",
        budget=foreseen.budget,
        device=environment.device,
        rows=rows,
        settings=plain(job.settings),
        binding=foreseen.binding,
        dry_run=True,
        stopped="dry run",
        smallest_peak=foreseen.smallest_peak,
        stages=tuple(clock.stages),
        notes=notes,
    )
