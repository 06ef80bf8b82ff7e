"""A run's plan explained from the run's own files: its graphs, its profile, and the plans that its search ghost-ran.

Tracing a model again takes minutes on a busy machine and may need the user's code; a finished search has stored what
an explanation needs. Other plans are those of the search: the solver is not asked for more.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from autockpt.analysis.build import facts_of_bytes, facts_of_measurement, fronts, smaller_batches_note
from autockpt.analysis.speed import speed_of
from autockpt.analysis.subject import budget_for, hardware_for, simulated_hardware, stored_times
from autockpt.analysis.why import budget_steps, is_faster, why
from autockpt.errors import RunDirectoryError, UsageError
from autockpt.history.rundir import RunDirectory
from autockpt.schema import SAVE, Budget, Choice, Plan, Prediction, Profile, plan_hash
from autockpt.schema.explanation import Explanation, Reach
from autockpt.schema.step_note import step_note


def explain_run(
    path: Path, plan: Plan, budget: str | Budget | None = None, headroom: str | None = None
) -> Explanation | None:
    """Explain the plan of a run from the run's files; no model is built. None where these do not explain it.

    ``path`` is the run's directory or the plan's file. A plan that was edited, or is another one than the run's answer,
    has no graph there. ``budget`` and ``headroom`` are asked for instead of the plan's own. Raises UsageError for what
    is no budget, RunDirectoryError where trials of the run are damaged.
    """
    try:
        run = RunDirectory.open(path if path.is_dir() else path.resolve().parent)
        answer, profile = run.plan(), run.profile()
        if answer is None or profile is None or plan.status == "unmeasured" or answer.hash != plan.hash:
            return None
        base, graph = run.graph(), run.graph("plan")
    except RunDirectoryError:  # no run, or one whose files are damaged
        return None
    if base is None or graph is None or plan.predicted is None:
        return None
    asked = budget_for(budget, headroom, plan, plan.workload, simulated_hardware(plan))
    saving: dict[str, Choice] = {unit.name: SAVE for unit in base.blocks()}
    choices = saving | plan.expand_planned()
    answers = Recorded(run, profile, saving)
    answers.add(choices, plan.predicted)
    device, head, finished = profile.op_times.device, profile.head(base.blocks()), run.finished()
    peak = max(plan.predicted.peak_bytes, graph.peak_bytes + device.overhead_bytes)
    held = plan.budget
    if asked is not None:
        held = asked.resolved(answers.save_all.peak_bytes, answers.lean.peak_bytes, device.capacity_bytes, device.kind)
    try:
        hardware = hardware_for(None, None, plan)
    except UsageError:  # described in a file that is not here
        hardware = None
    times = stored_times(profile.op_times)
    measured = facts_of_measurement(plan)
    tokens = counted if isinstance(counted := plan.settings.get("tokens"), int) else None
    return Explanation(
        model=plan.model.name or run.model,
        settings={k: v for k, v in plan.settings.items() if k != "model"},
        device=device.name,
        plan=str(path),
        status=plan.status,
        choices=choices,
        basis=times.basis,
        basis_note=times.note,
        budget=held,
        save_all_peak=answers.save_all.peak_bytes,
        smallest_peak=answers.lean.peak_bytes,
        **facts_of_bytes(graph, head.name if head is not None else None, device.overhead_bytes, peak),
        **measured,
        fronts=fronts(profile.menus, (*base.blocks(), *([head] if head else ())), choices),
        why=why(answers, choices, held.bytes if held else None),
        speed=speed_of(graph, base, times.times, hardware, tokens, measured["measured_seconds"]),
        step_note=step_note(times.times.environment, plan.workload),
        # sizes alone: these plans need not span all that a share of the activation range is of
        budgets=tuple(
            step if step.ours else step.model_copy(update={"label": ""})
            for step in budget_steps(answers, held, choices)
        ),
        notes=(
            *(finished.outcome.notes if finished is not None else plan.notes),
            *smaller_batches_note(plan),
            _not_here(plan, path),
        ),
    )


def _not_here(plan: Plan, path: Path) -> str:
    """What an explanation from a run's files lacks, and the command that computes it."""
    said = "Everything here is from the run's files; other plans are those that its search ghost-ran."
    if plan.workload is None:  # a live step: no model to build
        return said
    return (
        f"{said} `autockpt explain {shlex.quote(str(path))} --limits` traces the model again: it asks the solver for "
        "more plans and finds the largest batch and the longest sequence."
    )


class Recorded:
    """The plans that a run's search tried or ghost-ran, with what was predicted of each.

    ``saving`` is the plan that saves everything.
    """

    def __init__(self, run: RunDirectory, profile: Profile, saving: Mapping[str, Choice]) -> None:
        self._plain_seconds = profile.save_all_seconds
        self._saving = saving
        self._known: dict[str, Reach] = {}
        overhead = profile.op_times.device.overhead_bytes
        plain = Prediction(peak_bytes=profile.save_all_peak_bytes + overhead, step_seconds=profile.save_all_seconds)
        self.add(saving, plain)
        outlook = run.outlook()
        for ghost in outlook.plans if outlook is not None else ():
            self.add(ghost.choices, ghost.predicted)
        for trial in run.trials():
            self.add(trial.choices, trial.predicted)
            if trial.state in ("failed", "out_of_memory") and trial.plan_hash != plan_hash(saving):
                self._known.pop(trial.plan_hash, None)  # real steps refuted its prediction

    @property
    def save_all(self) -> Reach:
        return self._known[plan_hash(self._saving)]

    @property
    def lean(self) -> Reach:
        return min(self._known.values(), key=lambda reach: (reach.peak_bytes, reach.step_seconds))

    def add(self, choices: Mapping[str, Choice], predicted: Prediction | None) -> None:
        """Keep what was predicted of a plan; the last prediction of a plan counts."""
        if predicted is None or predicted.step_seconds is None:
            return
        base = self._plain_seconds
        self._known[plan_hash(choices)] = Reach(
            peak_bytes=predicted.peak_bytes,
            step_seconds=predicted.step_seconds,
            overhead=predicted.step_seconds / base - 1 if base > 0 else None,
            choices={**self._saving, **choices},
        )

    def reach(self, choices: Mapping[str, Choice], budget_bytes: int | None = None) -> Reach:
        return self._known[plan_hash(choices)]

    def at(self, budget_bytes: int, calls: int = 0) -> Reach | None:
        """The fastest known plan within a budget; None where none fits."""
        fitting = [reach for reach in self._known.values() if reach.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda reach: (reach.step_seconds, reach.peak_bytes), default=None)

    def leaner(self, chosen: Reach) -> Reach | None:
        return self.at(chosen.peak_bytes - 1)

    def faster(self, chosen: Reach, budget_bytes: int) -> Reach | None:
        known = [r for r in self._known.values() if r.peak_bytes > max(budget_bytes, chosen.peak_bytes)]
        faster = [r for r in known if is_faster(r, chosen)]
        return min(faster, key=lambda reach: (reach.peak_bytes, reach.step_seconds), default=None)
