"""Make the Explanation of a plan, a budget, a plain workload, or a run from its files.

A workload is ghost-run with every uniform plan, and what each choice costs is worked out by op times. Seconds rest on,
best first: ops timed on the device, a roofline of a named device, common rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from autockpt.analysis.explanation import Bargain, Basis, Explanation, Front, Speed
from autockpt.analysis.holdings import StepBytes, curve, joined, moment, telling_op
from autockpt.analysis.why import PredictedPlans, budget_rows, recorded, searched, why
from autockpt.cost import CostModel
from autockpt.cost.roofline import peak_flops
from autockpt.cost.simulation import simulate
from autockpt.devices import get_device, host_bytes_of, host_notes
from autockpt.errors import RunDirectoryError, UsageError
from autockpt.schema import (
    SAVE,
    Budget,
    Choice,
    Graph,
    Hardware,
    Listener,
    Measurement,
    Menu,
    OpTimes,
    Plan,
    Profile,
    ResolvedBudget,
    SearchRequest,
    SearchSpace,
    Silence,
    Trial,
    Unit,
    WorkloadSpec,
    format_bytes,
    parse_budget,
)
from autockpt.schema.choices import OFFLOAD, Offload, RecomputeOffload
from autockpt.schema.run_directory import RunDirectory, plan_at, undominated
from autockpt.schema.words import step_note
from autockpt.schema.workload import described_by
from autockpt.shipped import list_hardware, load_hardware
from autockpt.tracing import open_tracer
from autockpt.tuning.clock import Clock
from autockpt.tuning.entry import refuse_both, refuse_described
from autockpt.tuning.targets.simulated import Simulated
from autockpt.workload import Step

OTHER_WORKLOAD = "The workload is not the one that the plan was made for: its promise does not count."
_NOMINAL = (
    "seconds are modelled from FLOPs and bytes at nominal rates of common hardware: they rank choices and say little "
    "about this device (a search measures its op times; --hardware NAME models a device that is described)"
)


def made_for(plan: Plan, spec: WorkloadSpec | None) -> bool:
    """Whether what a plan promises is about this workload; a plan that names none is taken at its word."""
    return plan.workload is None or plan.workload == spec


def hardware_for(name: str | None, device: str | None, plan: Plan | None) -> Hardware | None:
    """The device that is modelled: the one named, else the one that a simulated plan was simulated for; or None.

    Raises UsageError where that is not among those described, and for a device besides.
    """
    refuse_both(name, device)
    if name is not None:
        return load_hardware(name)
    if device is not None or plan is None or plan.source != "simulated":
        return None
    planned = plan.environment.versions.get("simulated") if plan.environment is not None else None
    if planned is None or planned not in list_hardware():
        raise UsageError(
            f"the plan was simulated for {planned}, which is not among the devices described here",
            remedy="Add --hardware with the file that describes it, or --device to explain the plan for this machine.",
        )
    return load_hardware(planned)


def explain(
    plan: Plan | str | Path | None = None,
    workload: Mapping[str, Any] = {},
    *,
    step: Step | None = None,
    budget: str | Budget | None = None,
    device: str | None = None,
    hardware: str | None = None,
    listener: Listener | None = None,
) -> Explanation:
    """Where a step's bytes go under a plan, and what other plans would cost; no step is measured.

    The plan is ``plan``, or that of a file or run directory; else what fits ``budget``; else plain training. It is
    explained for the settings ``workload``, over those of the plan, or for a live ``step``. What is not given is as the
    plan has it: a run's own answer is explained from the run's files. Raises UsageError or WorkloadError for a model
    that cannot be built or has no blocks, PlanError for a plan that does not fit it. A budget that nothing fits is no
    error: the leanest plan is explained, and ``fits`` is false.
    """
    path = None if plan is None or isinstance(plan, Plan) else Path(plan)
    loaded = plan if plan is None or isinstance(plan, Plan) else plan_at(Path(plan))
    spec = loaded.workload if loaded is not None else None
    if step is not None:
        refuse_described(step, {**workload, "hardware": hardware, "device": device})
        spec = None
    else:
        spec = described_by(workload, spec) if workload else spec
        if loaded is not None and path is not None and spec == loaded.workload and not (device or hardware):
            stored = explain_run(path, loaded, budget)
            if stored is not None:
                return stored
        spec = spec or described_by({})
    card = hardware_for(hardware, device, loaded)
    within = None if budget is None else parse_budget(budget).with_headroom(None, simulated=card is not None)
    if budget is None and loaded is not None and (own := loaded.budget) is not None:  # the plan's own, in bytes
        within = Budget(text=own.asked, kind="bytes", size=own.whole, headroom=own.headroom)
    on = {"workload": spec, "step": step, "device": device, "hardware": card, "space": SearchSpace()}
    request = SearchRequest(budget=within or parse_budget("auto"), simulate=True, **on)
    return explain_step(request, listener or Silence(), loaded, path, any_budget=within is None)


def explain_step(
    request: SearchRequest,
    listener: Listener,
    plan: Plan | None = None,
    path: Path | None = None,
    *,
    any_budget: bool = False,
) -> Explanation:
    """Explain a step by ghost runs, and by the plans of a simulated search: ``plan``, which is that of ``path``, or
    what fits the budget; plain training where ``any_budget`` will do."""
    with ExitStack() as stack:
        target = Simulated(request, Clock(listener), plan=plan)
        prepared = target.trace(stack)
        cost_model = target.cost_model(prepared)
        traced, asked, card = prepared.traced, prepared.request, request.hardware
        known, trials = searched(asked, cost_model, target)
        budget = None if any_budget else trials.budget
        if plan is not None:
            same, choices, described = made_for(plan, asked.workload), target.choices, str(path or "a plan")
            known.keep(choices, cost_model.predictor.predict(choices))
            status = plan.status if same else "unmeasured"
            notes = (*(() if same else (OTHER_WORKLOAD,)), *_smaller_batches(plan))
        else:
            choices, described, notes = _chosen(known, trials.best, budget, cost_model)
            status = "simulated"
        graph, head = traced.tracer.trace(choices), traced.tracer.head
        on_host = host_notes(prepared.environment, host_bytes_of(graph.copies, prepared.environment.device.kind))
        return _explanation(
            known,
            _basis(cost_model.profile.op_times, "by an earlier search"),
            (traced.plain, graph),
            head.name if head is not None else None,
            known.reach(choices).peak_bytes,
            card,
            plan.measured if plan is not None and status == "measured" else None,
            cost_model.profile,
            model=request.name,
            settings=prepared.settings,
            plan=described,
            status=status,
            choices=choices,
            budget=budget,
            workload=request.workload,
            notes=(*asked.notes, *notes, *on_host),
        )


def explain_run(path: Path, plan: Plan, budget: str | Budget | None = None) -> Explanation | None:
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
    if base is None or graph is None or plan.predicted is None or plan.predicted.step_seconds is None:
        return None
    saving: dict[str, Choice] = {unit.name: SAVE for unit in base.blocks()}
    choices = saving | plan.expand_planned()
    known = recorded(run, profile, saving)
    known.keep(choices, plan.predicted)
    device, head, finished = profile.op_times.device, profile.head(base.blocks()), run.finished()
    held = plan.budget
    if budget is not None and (asked := parse_budget(budget)).text != (held.asked if held is not None else ""):
        if asked.kind == "activation_share":
            asked.refuse_share("counts from a leanest plan that a run's record does not hold")
        asked = asked.with_headroom(None, simulated=plan.source == "simulated")
        held = asked.resolved(known.save_all.peak_bytes, known.lean.peak_bytes, device.capacity_bytes, device.kind)
    try:
        hardware = hardware_for(None, None, plan)
    except UsageError:  # described in a file that is not here
        hardware = None
    return _explanation(
        known,
        _basis(profile.op_times, "in the plan's run"),
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
        workload=plan.workload,
        notes=(
            *(finished.outcome.notes if finished is not None else plan.notes),
            *_smaller_batches(plan),
            "Everything here is from the run's files; other plans are those that its search ghost-ran. With --hardware "
            "or --device the model is traced again, and the solver asked for more.",
        ),
    )


def _explanation(
    known: PredictedPlans,
    basis: tuple[Basis, str],
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
    workload: WorkloadSpec | None,
    **facts: Any,
) -> Explanation:
    """What both kinds of explanation work out alike.

    ``graphs`` are of the plain step and of the plan's, ``peak`` is what that one needs, its allocator included.
    """
    (base, graph), times = graphs, profile.op_times
    held = StepBytes(graph, head, times.device.overhead_bytes, peak)
    telling, speed, tokens = telling_op(held), None, settings.get("tokens")
    seconds = measured.step_seconds if measured is not None else None
    if took := seconds or (simulate(graph, times).step_seconds if basis[0] != "nominal" else 0.0):
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
        device=times.environment.device.name,
        choices=choices,
        basis=basis[0],
        basis_note=basis[1],
        budget=budget,
        budgets=budget_rows(known, budget, known.reach(choices)),
        step_note=step_note(times.environment, workload),
        save_all_peak=known.save_all.peak_bytes,
        smallest_peak=known.lean.peak_bytes,
        source=graph.source,
        peak_bytes=peak,
        holdings=held.holdings(),
        units=held.by_unit(telling),
        curve=curve(held),
        moment=moment(held, telling),
        measured_peak=measured.peak_bytes if measured is not None else None,
        measured_seconds=seconds,
        fronts=fronts(profile.menus, (*base.blocks(), *filter(None, [profile.head(base.blocks())])), choices),
        why=why(known, choices, budget.bytes if budget is not None else None),
        speed=speed,
        **facts,
    )


def _smaller_batches(plan: Plan) -> tuple[str, ...]:
    """A note on a plan with several sets of choices, of which one is explained."""
    if others := plan.smaller_batches:
        return (f"The choices explained are those for the largest batches; {len(others)} more for smaller.",)
    return ()


def _chosen(
    known: PredictedPlans, best: Trial | None, budget: ResolvedBudget | None, cost_model: CostModel
) -> tuple[dict[str, Choice], str, tuple[str, ...]]:
    """The choices that are explained where no plan is given, what they are in words, and notes."""
    if budget is None:
        return known.save_all.choices, "plain training: every layer saves everything", ()
    if best is not None:
        return dict(best.choices), f"the plan of a simulated search for {budget.words}", ()
    smallest = format_bytes(known.lean.peak_bytes)
    note = f"Nothing fits {format_bytes(budget.bytes)}: the smallest reachable peak is {smallest}"
    return known.lean.choices, "the leanest plan", (f"{note}. {cost_model.describe_bytes(known.lean.peak_bytes)}",)


def fronts(menus: Sequence[Menu], blocks: Sequence[Unit], choices: Mapping[str, Choice]) -> tuple[Front, ...]:
    """The front of every kind of unit: bytes kept for its backward against seconds over saving.

    ``choices`` by unit name; how long their copies may take changes no bytes that a unit keeps.
    """
    return tuple(_front(menu, [u for u in blocks if u.kind == menu.kind], choices) for menu in menus)


def _front(menu: Menu, units: Sequence[Unit], choices: Mapping[str, Choice]) -> Front:
    found = (choices[u.name] for u in units if u.name in choices)
    windows = Offload, RecomputeOffload  # how long a copy may take does not count here
    taken = Counter(c.model_copy(update={"window": 1}) if isinstance(c, windows) else c for c in found)
    hides = any(isinstance(choice, Offload) and choice.window > 1 for choice in choices.values())
    plain = menu.items[0].seconds
    best = [item.choice for item in undominated(menu.items, lambda i: (i.kept_bytes, i.seconds))]
    rows = [
        Bargain(
            choice=item.choice,
            kept_bytes=item.kept_bytes,
            extra_seconds=item.seconds - plain,
            taken=taken.get(item.choice, 0),
            hides=hides and item.choice == OFFLOAD and item.choice in taken,
        )
        for item in menu.items
        if item.choice in best or item.choice in taken
    ]
    rows.sort(key=lambda row: (-row.kept_bytes, row.extra_seconds))
    return Front(units=joined([u.name for u in units]), count=len(units), bargains=tuple(rows))


def _basis(times: OpTimes, when: str) -> tuple[Basis, str]:
    """What op times rest on, also in words: common rates, a simulated device, or what was measured, and ``when``."""
    if times.nominal:
        return "nominal", _NOMINAL
    if (simulated := times.environment.versions.get("simulated")) is not None:
        return "modelled", f"seconds are modelled by a roofline of {simulated}, nothing was timed"
    return "measured", f"op times were measured on {times.environment.device.name} {when}"


def step_graph(spec: WorkloadSpec, plan: Plan | None, *, hardware: str | None, device: str | None) -> Graph:
    """Every op of the described step, under the plan where there is one. Raises as ``explain`` does."""
    card = hardware_for(hardware, device, plan)
    with ExitStack() as stack:
        local = get_device("cpu" if card is not None else device)
        tracer, _ = open_tracer(stack, card, spec, plan, local.torch_device)
        graph = tracer.trace(plan.choices_for(tracer.units, tracer.head) if plan is not None else None)
        return graph.model_copy(update={"notes": (*tracer.notes, *graph.notes)})
