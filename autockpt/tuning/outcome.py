"""From what a search found to what people get: the plan, and the rows of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autockpt.schema import SAVE, Choice, Prediction, ResolvedBudget, Trial, Unit, format_bytes
from autockpt.schema.known import OURS
from autockpt.schema.plan import Comparison, Plan, PlanStatus, Verdict, plan_hash
from autockpt.tuning.opening import Opened
from autockpt.workload import fingerprint

_VERDICTS: dict[str, Verdict] = {"measured": "fits", "over_budget": "over_budget", "out_of_memory": "out_of_memory"}


def scored_rows(
    known: Mapping[str, Mapping[str, Choice]],
    trials: Sequence[Trial],
    best: Trial | None,
    host_budget: int | None = None,
) -> tuple[Comparison, ...]:
    """The well-known plans that were tried, then ours."""
    by_hash = {t.plan_hash: t for t in trials}
    rows = [_row(name, by_hash[h], host_budget) for name, c in known.items() if (h := plan_hash(c)) in by_hash]
    return (*rows, _row(OURS, best, host_budget)) if best is not None else tuple(rows)


def without_seconds(rows: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Rows of a simulation where nothing was ever timed: only bytes are shown."""
    predicted = [row.predicted and row.predicted.model_copy(update={"step_seconds": None}) for row in rows]
    return tuple(row.model_copy(update={"predicted": p}) for row, p in zip(rows, predicted, strict=True))


def make_plan(
    opened: Opened,
    choices: Mapping[str, Choice],
    budget: ResolvedBudget,
    *,
    source: PlanStatus,
    rows: Sequence[Comparison],
    notes: Sequence[str] = (),
) -> Plan:
    """The plan with its provenance; the head is listed only where that has a choice. ``rows`` end with its own."""
    question, tracer = opened.question, opened.found.tracer
    ours, head = rows[-1], tracer.head
    chosen = head is not None and choices.get(head.name, SAVE) != SAVE
    spec, settings = question.spec, plain(question.settings)
    if spec is not None and (named := settings.get("units")):  # found cuts are not looked for again
        spec = spec.model_copy(update={"units": named})
    return Plan.create(
        choices,
        [*tracer.units, head] if chosen and head is not None else tracer.units,
        model=question.name,
        fingerprint=fingerprint(tracer.units),
        source=source,
        workload=spec,
        settings=settings,
        environment=opened.environment,
        budget=budget,
        host_budget_bytes=question.host_budget,
        predicted=ours.predicted,
        measured=ours.measured,
        baselines=tuple(rows[:-1]),
        notes=tuple(notes),
    )


def said_of_head(head: Unit | None, choices: Mapping[str, Choice]) -> tuple[str, ...]:
    """A note on what a plan does with the output head, where that is anything."""
    if head is None or (choice := choices.get(head.name, SAVE)) == SAVE:
        return ()
    bits = "bit-equal with plain training's" if choice.exact else "equal to plain training's only up to rounding"
    return (f"The output head runs with `{head.name}: {choice}`: gradients are {bits}.",)


def plain(settings: Mapping[str, Any]) -> dict[str, str | int | float | bool | None]:
    """Settings as data: whatever is not a plain value, in words."""
    return {k: v if isinstance(v, str | int | float | bool | None) else str(v) for k, v in settings.items()}


def _over_host(predicted: Prediction | None, host_budget: int | None) -> str:
    """The remark on a plan that needs more of the host than it may."""
    if predicted is None or host_budget is None or predicted.host_bytes <= host_budget:
        return ""
    needs, has = format_bytes(predicted.host_bytes), format_bytes(host_budget)
    return f"not measured: it needs {needs} of host memory, the host budget is {has}"


def _row(name: str, trial: Trial, host_budget: int | None) -> Comparison:
    too_much = _over_host(trial.predicted, host_budget)
    return Comparison(
        name=name,
        verdict="over_budget" if too_much else _VERDICTS.get(trial.state, "not_measured"),
        predicted=trial.predicted,
        measured=trial.measured,
        plan_hash=trial.plan_hash,
        note=too_much or (trial.message if trial.state == "failed" else ""),
    )
