"""All that a page says about a run, worked out from the run's files alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from autockpt.analysis.subject import hardware_for
from autockpt.errors import RunDirectoryError, UsageError
from autockpt.hardware.roofline import peak_flops
from autockpt.history.rundir import RunDirectory
from autockpt.page.outlook import JobChange, changes
from autockpt.page.plans import SAID, SIMULATED, PlanPoint, Plans, plans_of
from autockpt.page.sentence import more_budget, next_steps, sentence, why
from autockpt.page.tape import Timeline, tape_of
from autockpt.reporting.explain_view import rates
from autockpt.schema import (
    SAVE,
    Choice,
    Comparison,
    Environment,
    Graph,
    Menu,
    Plan,
    Profile,
    ResolvedBudget,
    SearchOutcome,
)
from autockpt.schema.explanation import Speed
from autockpt.schema.known import OURS
from autockpt.schema.names import folded, outermost
from autockpt.schema.outlook import Outlook
from autockpt.schema.planview import set_lines
from autockpt.schema.step_note import step_note

# an absolute path, also behind a quote, an equals sign or a URL's scheme
_PATH = re.compile(r"(?<![\w.…/])(?:~|[A-Za-z]:)?[/\\]+(?:[^\s'\"/\\:,;()]+[/\\]+)+([^\s'\"/\\,;()]*)")


@dataclass(frozen=True)
class Line:
    """A run of layers with one choice: bytes each keeps, seconds it pays, and seconds per byte given up."""

    units: str
    count: int
    choice: Choice
    kept: int | None = None
    freed: int | None = None
    seconds: float | None = None

    @property
    def price(self) -> float | None:
        """Seconds per byte that is not kept; None where nothing is given up or nothing is known."""
        return self.seconds / self.freed if self.freed and self.seconds is not None and self.freed > 0 else None


@dataclass(frozen=True)
class Contents:
    """One run, ready to be drawn. ``units`` are those that choices are listed for, in order."""

    run: str
    plan_file: str
    model: str
    device: str
    source: str
    state: str
    sentence: str
    next_steps: tuple[str, ...]
    more_budget: tuple[str, ...]
    budget: ResolvedBudget | None
    rows: tuple[Comparison, ...]
    plan: Plan | None
    plans: Plans
    units: tuple[str, ...]
    lines: tuple[Line, ...]
    tapes: tuple[Timeline, ...]
    changes: tuple[JobChange, ...]
    outcome: SearchOutcome | None
    settings: Mapping[str, Any]
    environment: Environment | None
    command: str
    notes: tuple[str, ...]
    step_note: str = ""
    rates: str = ""
    compiled: bool = False
    why: str = ""

    @property
    def answer(self) -> PlanPoint | None:
        """The plan of the run, as a point."""
        return self.plans.points.get(self.plans.best or "")


def contents_of(run: RunDirectory) -> Contents:
    """Read a run and work out its page. Files that are missing leave their part out.

    Raises RunDirectoryError or PlanError where a file of the run is damaged.
    """
    finished, plan = run.finished(), run.plan()
    outcome = finished.outcome if finished is not None else None
    answer, asked_of = outcome or plan, plan or outcome
    profile, base, planned = run.profile(), run.graph(), run.graph("plan")
    plans = plans_of(run, profile, base, plan)
    refused = run.refusal()
    state = _state(run, plans, outcome is not None, refused)
    budget = answer.budget if answer is not None else None
    rows = _rows(outcome, plan)
    environment = run.environment()
    source = "simulated" if any(p.basis == SIMULATED for p in plans.points.values()) else "measured"
    times = profile.op_times if profile is not None else None
    graphs = {"save everything": base, "recompute all": run.graph("recompute"), OURS: planned}
    tapes = tuple(filter(None, (tape_of(name, graph, times) for name, graph in graphs.items() if graph is not None)))
    simulated_only = plan.workload.simulated_only() if plan is not None and plan.workload is not None else ()
    settings = dict(asked_of.settings if asked_of is not None else {})
    device = environment.device.name if environment is not None else ""
    every = [u for p in plans.points.values() for u in p.choices]
    lines = _lines(plan, profile, base.blocks() if base is not None else ())
    prices = [line.price for line in lines if line.price is not None]
    sets = set_lines(plan) if plan is not None else []
    said_of_sets = f"Sets of choices by the size of the batch: {'; '.join(sets)}." if sets else ""
    name = run.path.resolve().name
    place = Path(name) if run.path.is_absolute() else run.path
    plan_file = str(place / (run.answer_path or run.plan_path).name)
    return _tidied(
        Contents(
            run=name,
            plan_file=plan_file,
            model=(plan.model.name if plan is not None else "") or run.model or "a model",
            device=device + (" (simulated)" if source == "simulated" else ""),
            source=source,
            state=state,
            sentence=sentence(rows, budget, source, state, refused),
            next_steps=next_steps(plans, budget, source, state, plan_file, simulated_only),
            more_budget=more_budget(plans, budget, environment.device.capacity_bytes if environment else None),
            budget=budget,
            rows=rows,
            plan=plan,
            plans=plans,
            units=tuple(dict.fromkeys(outermost(dict.fromkeys(every)))),
            lines=lines,
            tapes=tapes,
            changes=changes(run.outlook() or Outlook(), run.sizes(), settings, plan),
            outcome=outcome,
            settings={k: v for k, v in settings.items() if v not in (None, "", False)},
            environment=environment,
            command=run.command(),
            notes=tuple(filter(None, (said_of_sets, *(answer.notes if answer is not None else ())))),
            why=refused.partition("\n")[2] if state == "infeasible" else why(plans, prices),
            compiled=bool(run.question.get("compile")),
            rates=_rates(planned, base, plan, settings),
            step_note=step_note(environment, plan.workload if plan is not None else None),
        )
    )


def _state(run: RunDirectory, plans: Plans, finished: bool, refused: str) -> str:
    """finished, running, infeasible, stopped (no search has come to its end) or empty."""
    try:
        if (run.path / "lock").exists():
            with run.lock():
                pass
    except RunDirectoryError:
        return "running"
    if refused:
        return "infeasible"
    if not plans.points:
        return "empty"
    return "finished" if finished else "stopped"


def _rows(outcome: SearchOutcome | None, plan: Plan | None) -> tuple[Comparison, ...]:
    if outcome is not None:
        return outcome.rows
    if plan is None:
        return ()
    ours = Comparison(name=OURS, verdict="fits", predicted=plan.predicted, measured=plan.measured, plan_hash=plan.hash)
    return (*plan.baselines, ours)


def _rates(graph: Graph | None, base: Graph | None, plan: Plan | None, settings: Mapping[str, Any]) -> str:
    """How fast the plan's step is, in words: FLOP/s, model FLOPs utilisation, tokens per second."""
    score = (plan.measured or plan.predicted) if plan is not None else None
    if plan is None or graph is None or base is None or score is None or not score.step_seconds:
        return ""
    try:
        hardware = hardware_for(None, None, plan)
    except UsageError:  # described in a file that is not here
        hardware = None
    tokens = settings.get("tokens")
    speed = Speed(
        seconds=score.step_seconds,
        flops=graph.flops,
        model_flops=base.flops,
        peak_flops=peak_flops(hardware, base) if hardware is not None else None,
        tokens=tokens if isinstance(tokens, int) else None,
        average_bytes=0,
    )
    return ", ".join(rates(speed, "" if plan.measured is not None else "~"))


def _lines(plan: Plan | None, profile: Profile | None, blocks: Sequence[Any]) -> tuple[Line, ...]:
    """The plan's own lines, with what the profile says of each."""
    if plan is None:
        return ()
    menus = {menu.representative: menu for menu in (profile.menus if profile is not None else ())}
    of_kind = {menu.kind: menu for menu in menus.values()}
    menus |= {unit.name: of_kind[unit.kind] for unit in blocks if unit.kind in of_kind}
    told = {name: (choice, _cost(menus.get(name), choice)) for name, choice in plan.expand_planned().items()}
    lines = []
    for pattern, names, (choice, cost) in folded(told):
        kept, freed, seconds = cost or (None, None, None)
        lines.append(Line(pattern, len(names), choice, kept, freed, seconds))
    return tuple(lines)


def _cost(menu: Menu | None, choice: Choice) -> tuple[int, int, float] | None:
    """Bytes kept, bytes given up over saving, and extra seconds; None where the menu does not have the choice."""
    item = next((i for i in menu.items if i.choice == choice), None) if menu is not None else None
    plain = next((i for i in menu.items if i.choice == SAVE), None) if menu is not None else None
    if item is None or plain is None:
        return None
    return item.kept_bytes, plain.kept_bytes - item.kept_bytes, item.seconds - plain.seconds


def without_paths(text: str) -> str:
    """The text with absolute paths cut to their last part: where a run lies says whose machine it was."""
    return _PATH.sub(lambda match: f"…/{match[1]}" if match[1] else "…", text)


def _tidied(value: Any) -> Any:
    """The same data with ``without_paths`` on every text of the page's own data objects."""
    if isinstance(value, str):
        return without_paths(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _tidied(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, tuple):
        return tuple(_tidied(v) for v in value)
    if isinstance(value, dict):
        return {_tidied(k): _tidied(v) for k, v in value.items()}
    return value


def as_json(contents: Contents) -> dict[str, Any]:
    """The page's data for other programs and for the page's own script: numbers, names and strips."""
    kinds: dict[str, int] = {}
    plans = {}
    for key, point in contents.plans.points.items():
        figures = {k: v for k, v in vars(point).items() if k not in ("choices", "key") and v not in (None, "")}
        strip = [kinds.setdefault(str(point.choices.get(unit, SAVE)), len(kinds)) for unit in contents.units]
        plans[key] = figures | {"strip": strip}
    known = {str(c): c for point in contents.plans.points.values() for c in point.choices.values()} | {"save": SAVE}
    return {
        **{
            name: getattr(contents, name)
            for name in ("run", "model", "device", "source", "state", "sentence", "step_note")
        },
        "budget_bytes": contents.budget.bytes if contents.budget is not None else None,
        "headroom": contents.budget.headroom if contents.budget is not None else "",
        "units": list(contents.units),
        "choices": [
            {"text": without_paths(text), "kind": known[text].kind, "letter": known[text].letter} for text in kinds
        ],
        "plans": plans,
        "said": SAID,
        "best": contents.plans.best,
        "front": list(contents.plans.front),
        "thresholds": [asdict(t) for t in contents.plans.thresholds],
        "tapes": [asdict(t) for t in contents.tapes],
        "settings": {k: without_paths(str(v)) for k, v in contents.settings.items()},
        "versions": dict(contents.environment.versions) if contents.environment is not None else {},
        "command": contents.command,
    }
