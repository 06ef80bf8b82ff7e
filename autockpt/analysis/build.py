"""From a plan, a budget or a plain workload to the whole Explanation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autockpt.analysis.holdings import StepBytes, curve, joined, moment, peak_op, telling_op
from autockpt.analysis.limits import MOST_TIMES, Lean, largest_lean, workload_limits
from autockpt.analysis.speed import speed_of
from autockpt.analysis.subject import ExplainRequest, Subject, open_subject
from autockpt.analysis.why import Answers, budget_steps, resolved, why
from autockpt.devices import host_bytes_of, said_of_host
from autockpt.history.promises import OTHER_WORKLOAD, made_for
from autockpt.history.trials import undominated
from autockpt.profiling import said_of
from autockpt.schema import (
    Budget,
    Choice,
    Graph,
    Listener,
    Menu,
    Plan,
    PlanStatus,
    ResolvedBudget,
    Silence,
    Unit,
    format_bytes,
)
from autockpt.schema.choices import OFFLOAD, Offload, RecomputeOffload
from autockpt.schema.device import WITHOUT_STREAMS
from autockpt.schema.explanation import Bargain, Explanation, Front, Largest, Reach
from autockpt.schema.step_note import step_note
from autockpt.tuning.targets.shallow_twin import calls_per_candidate


def explain(question: ExplainRequest, listener: Listener | None = None) -> Explanation:
    """Where a step's bytes go under a plan, and what other plans would cost; no step is measured.

    Raises UsageError or WorkloadError for a model that cannot be built or has no blocks, PlanError for a plan that does
    not fit it. A budget that nothing fits is no error: the leanest plan is explained, and ``fits`` is false.
    """
    listener = listener or Silence()
    with open_subject(question, listener) as subject:
        listener.stage("solving")
        answers = Answers(subject.profiled, subject.uniform)
        budget = resolved(question, answers)
        found = None
        if budget is not None and question.plan is None:
            found = answers.at(budget.bytes, calls_per_candidate(subject.base))  # as a search would
        steps = budget_steps(answers, budget, subject.choices if question.plan is not None else None)
        reaches = [found, *(step.reach for step in steps if step.ours)]
        choices, said, status, notes = _chosen(subject, answers, budget, reaches)
        graph = subject.tracer.trace(choices)
        environment = subject.times.times.environment
        device = environment.device
        on_host = said_of_host(environment, host_bytes_of(graph.copies, device.kind))
        measured = facts_of_measurement(question.plan if status == "measured" else None)
        reasons = why(answers, choices, budget.bytes if budget else None)
        limits = _limits(subject, answers, budget, listener)
        seconds, tokens = measured["measured_seconds"], subject.tracer.settings.get("tokens")
        speed = None
        if subject.times.basis != "nominal" or seconds:  # such rates rank choices, and say nothing about seconds
            counted = tokens if isinstance(tokens, int) else None
            speed = speed_of(graph, subject.base, subject.times.times, question.hardware, counted, seconds)
        return Explanation(
            model=question.name,
            settings={k: v for k, v in subject.tracer.settings.items() if k != "model"},
            device=device.name,
            plan=said,
            status=status,
            choices=choices,
            basis=subject.times.basis,
            basis_note=subject.times.note,
            budget=budget,
            save_all_peak=answers.save_all.peak_bytes,
            smallest_peak=answers.lean.peak_bytes,
            **facts_of_bytes(graph, subject.head, answers.overhead, subject.needs(graph)),
            **measured,
            fronts=fronts(subject.profiled.profile.menus, subject.profiled.units, choices),
            why=reasons,
            speed=speed,
            step_note=step_note(environment, question.spec),
            budgets=steps,
            limits=limits,
            notes=(*subject.notes, *notes, *on_host, *_of_device(question, device.kind)),
        )


def facts_of_bytes(graph: Graph, head: str | None, overhead: int, peak: int) -> dict[str, Any]:
    """The fields of an explanation about the bytes of its step.

    ``overhead`` are the bytes of the device's context. ``peak`` is what the device needs, its allocator included.
    """
    held = StepBytes(graph, head, overhead, peak - graph.peak_bytes - overhead)
    at, telling = peak_op(graph), telling_op(held)
    return {
        "source": graph.source,
        "peak_bytes": peak,
        "holdings": held.holdings(at),
        "units": held.by_unit(telling),
        "ops": held.by_kind(telling),
        "curve": curve(held),
        "moment": moment(held, telling),
    }


def facts_of_measurement(plan: Plan | None) -> dict[str, Any]:
    """The fields of an explanation about what was measured of its plan. None: a plan without a measurement."""
    measured = plan.measured if plan is not None else None
    return {
        "measured_peak": measured.peak_bytes if measured else None,
        "measured_seconds": measured.step_seconds if measured else None,
        "beside": tuple(row for row in plan.baselines if row.measured) if plan and measured else (),
    }


def smaller_batches_note(plan: Plan) -> tuple[str, ...]:
    """A note on a plan with several sets of choices, of which one is explained."""
    if others := plan.smaller_batches:
        return (f"the choices explained are those for the largest batches; {len(others)} more for smaller",)
    return ()


def _chosen(
    subject: Subject, answers: Answers, budget: ResolvedBudget | None, reaches: Sequence[Reach | None]
) -> tuple[dict[str, Choice], str, PlanStatus, tuple[str, ...]]:
    """The plan that is explained: its choices, what it is in words, its status, and notes."""
    question = subject.question
    if question.plan is not None and subject.choices is not None:
        same = made_for(question.plan, question.spec)
        status = question.plan.status if same else "unmeasured"
        notes = (*(() if same else (OTHER_WORKLOAD,)), *smaller_batches_note(question.plan))
        return dict(subject.choices), str(question.plan_path or "a plan"), status, notes
    if budget is None:
        return answers.save_all.choices, "plain training: every layer saves everything", "simulated", ()
    found = min((reach for reach in reaches if reach is not None), key=lambda r: r.step_seconds, default=None)
    if found is not None:
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
        cls=units[0].cls if units else "",
        count=len(units),
        bargains=tuple(shown),
        left_out=len(rows) - len(shown),
    )


def _without_window(choice: Choice) -> Choice:
    return choice.model_copy(update={"window": 1}) if isinstance(choice, (Offload, RecomputeOffload)) else choice


def _limits(
    subject: Subject, answers: Answers, budget: ResolvedBudget | None, listener: Listener
) -> tuple[Largest, ...]:
    """The largest sizes under the budget, where there is one and they are wanted."""
    if budget is None or not subject.question.limits or subject.base.source != "ghost":
        return ()
    listener.stage("trying other sizes")
    found = workload_limits(subject, {"save everything": {}, "leanest": answers.lean.choices}, budget.bytes)
    fixed = Budget(text=budget.words, kind="bytes", size=budget.bytes)  # a share would grow with the sizes
    question = replace(subject.question, budget=fixed)
    return tuple(
        largest_lean(question, limit.dimension, listener, Lean(limit, answers.lean.choices)) or limit
        if limit.plan == "leanest" and (limit.value or 0) < MOST_TIMES * limit.now
        else limit
        for limit in found
    )


def _of_device(question: ExplainRequest, kind: str) -> tuple[str, ...]:
    if question.hardware is not None:
        return (said_of(question.hardware),)
    if kind in WITHOUT_STREAMS:
        return ()
    return (
        "bytes are those that tensors hold, and the context: what the caching allocator reserves beyond them is not in",
    )
