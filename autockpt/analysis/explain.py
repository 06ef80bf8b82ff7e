"""From a plan, a budget, a plain workload or a run's own files to the whole Explanation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from autockpt.analysis.explanation import Bargain, Explanation, Front, Speed
from autockpt.analysis.holdings import StepBytes, curve, joined, moment, telling_op
from autockpt.analysis.subject import (
    OTHER_WORKLOAD,
    ExplainRequest,
    Subject,
    Times,
    budget_for,
    hardware_for,
    made_for,
    open_subject,
    simulated_hardware,
)
from autockpt.analysis.why import Answers, Known, budget_steps, recorded, resolved, why
from autockpt.cost import said_of
from autockpt.cost.roofline import peak_flops
from autockpt.cost.step import simulate
from autockpt.devices import host_bytes_of, said_of_host
from autockpt.errors import AutockptError, RunDirectoryError, UsageError
from autockpt.schema import (
    SAVE,
    Budget,
    Choice,
    Estimate,
    Graph,
    Hardware,
    Listener,
    Measurement,
    Menu,
    Plan,
    PlanStatus,
    Profile,
    ResolvedBudget,
    Silence,
    Unit,
    WorkloadSpec,
    format_bytes,
)
from autockpt.schema.choices import OFFLOAD, Offload, RecomputeOffload
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.schema.runs import RunDirectory, undominated
from autockpt.schema.words import step_note
from autockpt.tuning.sizes import resized
from autockpt.tuning.targets.simulated import SIMULATED
from autockpt.workload import Step


def explain(
    spec: WorkloadSpec | None,
    plan: Plan | None = None,
    path: Path | None = None,
    *,
    step: Step | None = None,
    budget: str | Budget | None = None,
    headroom: str | None = None,
    device: str | None = None,
    hardware: str | None = None,
    listener: Listener | None = None,
) -> Explanation:
    """Where a step's bytes go under a plan, and what other plans would cost; no step is measured.

    The plan is ``plan``, from the file or run directory ``path``; else what fits ``budget``; else plain training. It is
    explained for the workload ``spec``, or for a live ``step``. What is not given is as the plan has it: a run's own
    answer is explained from the run's files. Raises UsageError or WorkloadError for a model that cannot be built or has
    no blocks, PlanError for a plan that does not fit it. A budget that nothing fits is no error: the leanest plan is
    explained, and ``fits`` is false.
    """
    as_planned = step is None and plan is not None and spec == plan.workload and not (device or hardware)
    if as_planned and plan is not None and path is not None:
        stored = explain_run(path, plan, budget, headroom)
        if stored is not None:
            return stored
    if spec is None and step is None:
        raise UsageError("no model was named", remedy='Give --model llama-8b (model="llama-8b" in Python).')
    card = hardware_for(hardware, device, plan)
    within = budget_for(budget, headroom, plan, spec, card.name if card is not None else None)
    return explain_step(ExplainRequest(spec, plan, path, within, device, card, step), listener or Silence())


def explain_step(question: ExplainRequest, listener: Listener) -> Explanation:
    """Explain a step by ghost runs, and by the solver's plans for other budgets."""
    with open_subject(question, listener) as subject:
        listener.stage("solving")
        answers = Answers(subject.profiled, subject.uniform)
        budget = resolved(question, answers)
        if budget is not None and question.plan is None:
            answers.at(budget.bytes, SIMULATED.checks)  # as many ghost runs as a search would take
        if subject.choices is not None:  # a longer search may have found it: nothing slower is said to be the fastest
            answers.keep(answers.reach(subject.choices, budget.bytes if budget is not None else None))
        steps = budget_steps(answers, budget)
        choices, said, status, notes = _chosen(subject, answers, budget)
        graph = subject.tracer.trace(choices)
        environment = subject.times.times.environment
        on_host = said_of_host(environment, host_bytes_of(graph.copies, environment.device.kind))
        return _explanation(
            answers,
            subject.times,
            (subject.base, graph),
            subject.head,
            subject.needs(graph),
            question.hardware,
            question.plan.measured if question.plan is not None and status == "measured" else None,
            subject.profiled.profile,
            model=question.name,
            settings=subject.tracer.settings,
            plan=said,
            status=status,
            choices=choices,
            budget=budget,
            budgets=steps,
            step_note=step_note(environment, question.spec),
            notes=(*subject.notes, *notes, *on_host, *_of_device(question, environment.device.kind)),
        )


def explain_run(
    path: Path, plan: Plan, budget: str | Budget | None = None, headroom: str | None = None
) -> Explanation | None:
    """Explain the plan of a run from the run's files; no model is built. None where these do not explain it.

    Tracing a model again takes minutes on a busy machine and may need the user's code. Other plans are those that the
    search ghost-ran: the solver is not asked for more. ``path`` is the run's directory or the plan's file. A plan that
    was edited, or is another one than the run's answer, has no graph there. Raises UsageError for what is no budget,
    RunDirectoryError where trials of the run are damaged.
    """
    try:
        run = RunDirectory.open(path if path.is_dir() else path.resolve().parent)
        answer, profile = run.plan(), run.profile()
        base, graph = run.graph(), run.graph("plan")
    except RunDirectoryError:  # no run, or one whose files are damaged
        return None
    if answer is None or profile is None or plan.status == "unmeasured" or answer.hash != plan.hash:
        return None
    if base is None or graph is None or plan.predicted is None:
        return None
    asked = budget_for(budget, headroom, plan, plan.workload, simulated_hardware(plan))
    saving: dict[str, Choice] = {unit.name: SAVE for unit in base.blocks()}
    choices = saving | plan.expand_planned()
    answers = recorded(run, profile, saving)
    answers.keep(answers.reach_of(choices, plan.predicted))
    device, head, finished = profile.op_times.device, profile.head(base.blocks()), run.finished()
    held = plan.budget
    if asked is not None:
        held = asked.resolved(answers.save_all.peak_bytes, answers.lean.peak_bytes, device.capacity_bytes, device.kind)
    try:
        hardware = hardware_for(None, None, plan)
    except UsageError:  # described in a file that is not here
        hardware = None
    return _explanation(
        answers,
        Times.of(profile.op_times, "in the plan's run"),
        (base, graph),
        head.name if head is not None else None,
        max(plan.predicted.peak_bytes, graph.peak_bytes + device.overhead_bytes),
        hardware,
        plan.measured,
        profile,
        model=plan.model.name or run.model,
        settings=plan.settings,
        plan=str(path),
        status=plan.status,
        choices=choices,
        budget=held,
        # sizes alone: these plans need not span all that a share of the activation range is of
        budgets=tuple(
            step if step.ours else step.model_copy(update={"label": ""}) for step in budget_steps(answers, held)
        ),
        step_note=step_note(profile.op_times.environment, plan.workload),
        notes=(
            *(finished.outcome.notes if finished is not None else plan.notes),
            *_smaller_batches(plan),
            "Everything here is from the run's files; other plans are those that its search ghost-ran. With --hardware "
            "or --device the model is traced again, and the solver asked for more.",
        ),
    )


def _explanation(
    answers: Known,
    times: Times,
    graphs: tuple[Graph, Graph],
    head: str | None,
    peak: int,
    hardware: Hardware | None,
    measured: Measurement | None,
    profile: Profile,
    *,
    settings: Mapping[str, Any],
    choices: dict[str, Choice],
    budget: ResolvedBudget | None,
    **facts: Any,
) -> Explanation:
    """What both kinds of explanation work out alike.

    ``graphs`` are of the plain step and of the plan's, ``peak`` is what that one needs, its allocator included.
    """
    base, graph = graphs
    held = StepBytes(graph, head, times.times.device.overhead_bytes, peak)
    telling, speed, tokens = telling_op(held), None, settings.get("tokens")
    seconds = measured.step_seconds if measured is not None else None
    if took := seconds or (simulate(graph, times.times).step_seconds if times.basis != "nominal" else 0.0):
        # nominal rates rank choices, and say nothing about seconds
        speed = Speed(
            seconds=took,
            flops=graph.flops,
            model_flops=base.flops,
            peak_flops=peak_flops(hardware, base) if hardware is not None else None,
            tokens=tokens if isinstance(tokens, int) else None,
        )
    return Explanation(
        settings={k: v for k, v in settings.items() if k != "model"},
        device=times.times.environment.device.name,
        choices=choices,
        basis=times.basis,
        basis_note=times.note,
        budget=budget,
        save_all_peak=answers.save_all.peak_bytes,
        smallest_peak=answers.lean.peak_bytes,
        source=graph.source,
        peak_bytes=peak,
        holdings=held.holdings(),
        units=held.by_unit(telling),
        curve=curve(held),
        moment=moment(held, telling),
        measured_peak=measured.peak_bytes if measured is not None else None,
        measured_seconds=seconds,
        fronts=fronts(profile.menus, (*base.blocks(), *filter(None, [profile.head(base.blocks())])), choices),
        why=why(answers, choices, budget.bytes if budget is not None else None),
        speed=speed,
        **facts,
    )


def _smaller_batches(plan: Plan) -> tuple[str, ...]:
    """A note on a plan with several sets of choices, of which one is explained."""
    if others := plan.smaller_batches:
        return (f"the choices explained are those for the largest batches; {len(others)} more for smaller",)
    return ()


def _chosen(
    subject: Subject, answers: Answers, budget: ResolvedBudget | None
) -> tuple[dict[str, Choice], str, PlanStatus, tuple[str, ...]]:
    """The plan that is explained: its choices, what it is in words, its status, and notes."""
    question = subject.question
    if question.plan is not None and subject.choices is not None:
        same = made_for(question.plan, question.spec)
        status = question.plan.status if same else "unmeasured"
        notes = (*(() if same else (OTHER_WORKLOAD,)), *_smaller_batches(question.plan))
        return dict(subject.choices), str(question.plan_path or "a plan"), status, notes
    if budget is None:
        return answers.save_all.choices, "plain training: every layer saves everything", "simulated", ()
    if (found := Known.at(answers, budget.bytes)) is not None:  # of those that the solver was asked for
        return found.choices, f"the solver's plan for {budget.words}", "simulated", ()
    needs = subject.profiled.needs(answers.lean.peak_bytes)
    smallest = format_bytes(answers.lean.peak_bytes)
    note = f"nothing fits {format_bytes(budget.bytes)}: the smallest reachable peak is {smallest}"
    return answers.lean.choices, "the leanest plan", "simulated", (f"{note}. {needs}",)


def fronts(menus: Sequence[Menu], blocks: Sequence[Unit], choices: Mapping[str, Choice]) -> tuple[Front, ...]:
    """The front of every kind of unit: bytes kept for its backward against seconds over saving.

    Dominated choices that the plan took are listed and say so. ``choices`` by unit name; how long their copies may
    take changes no bytes that a unit keeps.
    """
    return tuple(_front(menu, [u for u in blocks if u.kind == menu.kind], choices) for menu in menus)


def _front(menu: Menu, units: Sequence[Unit], choices: Mapping[str, Choice]) -> Front:
    taken = Counter(_without_window(choices[u.name]) for u in units if u.name in choices)
    hides = any(isinstance(choice, Offload) and choice.window > 1 for choice in choices.values())
    plain = menu.items[0].seconds
    best = [item.choice for item in undominated(menu.items, lambda i: (i.kept_bytes, i.seconds))]
    rows = [
        Bargain(
            choice=item.choice,
            kept_bytes=item.kept_bytes,
            extra_seconds=item.seconds - plain,
            taken=taken.get(item.choice, 0),
            dominated=item.choice not in best,
            hides=hides and item.choice == OFFLOAD and item.choice in taken,
        )
        for item in menu.items
    ]
    shown = [row for row in rows if not row.dominated or row.taken]
    shown.sort(key=lambda row: (-row.kept_bytes, row.extra_seconds))
    return Front(
        units=joined([u.name for u in units]),
        count=len(units),
        bargains=tuple(shown),
        left_out=len(rows) - len(shown),
    )


def _without_window(choice: Choice) -> Choice:
    return choice.model_copy(update={"window": 1}) if isinstance(choice, (Offload, RecomputeOffload)) else choice


def _of_device(question: ExplainRequest, kind: str) -> tuple[str, ...]:
    if question.hardware is not None:
        return (said_of(question.hardware),)
    if kind in WITHOUT_STREAMS:
        return ()
    return (
        "bytes are those that tensors hold, and the context: what the caching allocator reserves beyond them is not in",
    )


def estimate_step(
    step: Step, batch_sizes: Sequence[int] | None = None, seq_lens: Sequence[int] | None = None
) -> Iterator[Estimate]:
    """One answer for each size, the step's own where None is given; its batch is cut or repeated.

    By ghost runs on the device of the step's model, of which a plan may use all. Seconds are known where a search
    timed this step's ops before. A size that cannot be had says why in ``note``.
    """
    own = {name: step.settings.get(name) for name in ("batch_size", "seq_len")}
    for sizes in product(batch_sizes or [own["batch_size"]], seq_lens or [own["seq_len"]]):
        wanted = {name: size if isinstance(size, int) else None for name, size in zip(own, sizes, strict=True)}
        others = {name: size for name, size in wanted.items() if size not in (None, own[name])}
        row = Estimate(model=type(step.model).__name__, card=str(step.device), fits=False, **wanted)
        try:
            said = explain(None, step=resized(step, **others) if others else step, budget="auto")
        except AutockptError as error:
            yield row.model_copy(update={"note": error.message})
            continue
        found: dict[str, Any] = {"card": said.device, "smallest_peak": said.smallest_peak}
        if said.fits:
            found |= {
                "fits": True,
                "peak_bytes": said.peak_bytes,
                "step_seconds": said.speed.seconds if said.speed is not None else None,
                "choices": dict(Counter(choice.kind for choice in said.choices.values() if choice != SAVE)),
            }
        yield row.model_copy(update=found)
