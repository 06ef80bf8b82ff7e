"""The plan of a run, and of one trial, as a search would have written it had that trial been its answer."""

from __future__ import annotations

from pathlib import Path

from autockpt.errors import PlanError, RunDirectoryError
from autockpt.history.rundir import RunDirectory
from autockpt.schema import Plan, Trial, Unit, WorkloadSpec


def plan_at(path: Path) -> Plan:
    """The plan of a file, or of a run's directory. Raises RunDirectoryError for a run without one."""
    return Plan.load(plan_file(path))


def plan_file(path: Path) -> Path:
    """The file itself, or that of a run's answer: with its sets for smaller batches, where it has them."""
    if not path.exists():
        remedy = "Check the path: it is that of a plan's file or of a run's directory, not a model's name."
        raise PlanError(f"there is no file {path}", remedy=remedy)
    if not path.is_dir():
        return path
    run = RunDirectory.open(path)
    if (found := run.answer_path) is not None:
        return found
    why, _, remedy = run.refusal().partition("\n")
    if not why:
        why, remedy = "its search has not come to its end", "The command in its command.txt continues it."
    raise RunDirectoryError(f"{path} holds no plan: {why}", remedy=remedy)


def trial_of(run: RunDirectory, number: int) -> Trial:
    """A trial by its number. Raises RunDirectoryError where the run has none of that number."""
    trials = {trial.number: trial for trial in run.trials()}
    if number not in trials:
        known = f"its trials are 0 to {max(trials)}" if trials else "nothing was tried yet"
        raise RunDirectoryError(
            f"{run.path} has no trial {number}: {known}", remedy=f"`autockpt history {run.path}` lists them."
        )
    return trials[number]


def plan_of_trial(run: RunDirectory, trial: Trial) -> Plan:
    """The trial's choices with the provenance of its run; ``source`` says whether steps were measured.

    Raises RunDirectoryError where the run lacks the traced step, which tells the model's units.
    """
    graph, answer, finished = run.graph(), run.plan(), run.finished()
    if graph is None:
        raise RunDirectoryError(
            f"{run.path} has no traced step, so its plans cannot be written",
            remedy="Search again; compiled searches keep only the plan that they answered with.",
        )
    budget = answer.budget if answer is not None else finished.outcome.budget if finished is not None else None
    over = budget is not None and trial.score is not None and trial.score.peak_bytes > budget.bytes
    notes = (f"trial {trial.number} of {run.path.name}, {trial.name}",)
    if over or not trial.feasible:
        notes = (*notes, f"not the answer of that run: {trial.state.replace('_', ' ')}")
    asked = run.question.get("workload")
    workload = WorkloadSpec.model_validate(asked) if isinstance(asked, dict) else None
    return Plan.create(
        trial.choices,
        [*graph.units, *_head(answer, trial, graph.units)],
        model=answer.model.name if answer is not None else run.model,
        fingerprint=str(run.question.get("model_fingerprint") or ""),
        source="measured" if trial.measured else "simulated" if trial.predicted else "unmeasured",
        workload=answer.workload if answer is not None else workload,
        settings=answer.settings if answer is not None else {},
        environment=run.environment(),
        budget=budget,
        host_budget_bytes=answer.host_budget_bytes if answer is not None else None,
        predicted=trial.predicted,
        measured=trial.measured,
        baselines=answer.baselines if answer is not None else (),
        notes=notes,
    )


def _head(answer: Plan | None, trial: Trial, units: tuple[Unit, ...]) -> list[Unit]:
    """The output head that the trial has a choice for, where the run's answer tells its class."""
    classes = answer.model.classes if answer is not None else {}
    listed = {unit.name for unit in units}
    return [
        Unit(name=name, cls=classes[name], kind=0, role="head")
        for name in trial.choices
        if name not in listed and name in classes
    ]
