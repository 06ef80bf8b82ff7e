"""The directory of a run: everything a search found out, written so that a kill at any moment loses nothing.

results/<model>_<device>_<budget>_<hash of the question>/
    question.json      what was asked          trials.jsonl      one line per trial, only ever appended to
    run_id             names this run          command.txt       every command line
    environment.json   device and versions     graph.json.gz     the plain step as traced
    plan.yaml          the answer              profile.json      what each choice costs
    study.db           the Optuna study *      outcome.json      what was answered, once the search had ended
    outlook.json       ghost runs of other budgets and other jobs, of which nothing was measured
    in_flight.json     plans in whose measurement a process ended, and how often
    report.html        all of it on one page   graph-*.json.gz   the steps of the plan, and of recomputing everything

* Of a measured run: a simulated one asks for few points, and keeps them in memory.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import secrets
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from autockpt.errors import PlanError, RunDirectoryError, without_passwords
from autockpt.schema.base import first_violation
from autockpt.schema.device import Environment
from autockpt.schema.files import FULL, atomic_write, locked, open_in_place, read_regular, reason, set_aside
from autockpt.schema.graph import Graph, Unit
from autockpt.schema.plan import Plan
from autockpt.schema.profile import Profile
from autockpt.schema.request import FinishedSearch, question_hash
from autockpt.schema.trial import Outlook, Trial

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
GraphName = Literal["plain", "recompute", "plan"]
_QUESTION, _TRIALS, _IN_FLIGHT = "question.json", "trials.jsonl", "in_flight.json"
_OF_THE_QUESTION = ("workload", "settings", "budget", "host_budget_bytes", "baselines")
_GRAPHS: dict[GraphName, str] = {
    "plain": "graph.json.gz",
    "recompute": "graph-recompute.json.gz",
    "plan": "graph-plan.json.gz",
}


class RunDirectory:
    """One run on disk; what ``autockpt.open_run`` returns.

    Every method that touches a file raises RunDirectoryError with a remedy where that fails. Bytes and seconds.
    """

    def __init__(self, path: Path, question: Mapping[str, Any]) -> None:
        self.path = path
        self.question = dict(question)
        self.set_aside: Path | None = None
        """Where an earlier run, or a plan that this one did not write, was moved to."""

    def __repr__(self) -> str:
        return f"<autockpt run {self.path.name}>"

    @classmethod
    def enter(cls, path: Path, question: Mapping[str, Any], *, fresh: bool = False) -> RunDirectory:
        """The directory of this question, made where it is missing; ``directory_name`` names it.

        ``fresh`` renames an earlier one to ``….1`` first (then ``set_aside`` says where it went). Refuses a directory
        of that name which holds another question or a damaged one.
        """
        question = json.loads(json.dumps(question))
        run = cls(path, question)
        with _explained(path):
            if fresh and path.exists():
                with run.lock():  # not from under a search that is at work there
                    pass
                run.set_aside = set_aside(path)
            path.mkdir(parents=True, exist_ok=True)
        if not ((path / _QUESTION).exists() or (path / _TRIALS).exists()):
            run.write(_QUESTION, json.dumps(question, indent=2, sort_keys=True) + "\n")
        found = cls.open(path).question
        if differing := [name for name in sorted({*question, *found}) if found.get(name) != question.get(name)]:
            raise RunDirectoryError(
                f"{path} belongs to another question (it differs in {', '.join(differing)})",
                remedy="Use --fresh to set that directory aside, or --out for another place.",
            )
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """An existing run, to read. Raises RunDirectoryError where the path is no run directory."""
        path = Path(path)
        if not any((path / name).exists() for name in (_QUESTION, _TRIALS)):
            what = "is not the directory of a run" if path.exists() else "does not exist"
            raise RunDirectoryError(
                f"{path} {what}", remedy="Give a directory that `autockpt search` made, as results/…"
            )
        with _explained(path / _QUESTION):
            return cls(path, dict(json.loads(read_regular(path / _QUESTION))))

    @staticmethod
    def below(folder: Path) -> Iterator[Path]:
        """The directories of runs in a folder and in those below it, damaged ones too."""
        for path, folders, names in os.walk(folder):
            if {_QUESTION, _TRIALS} & {*names}:
                folders.clear()  # what a run holds is its own
                yield Path(path)
            folders.sort()

    def lock(self) -> AbstractContextManager[None]:
        """Hold the directory until the context ends. Raises RunDirectoryError where another search holds it."""

        def busy(holder: str) -> None:
            raise RunDirectoryError(
                f"another search ({holder}) is at work in {self.path}",
                remedy="Wait for it or stop it; or ask in another folder with --out.",
            )

        path = self.path / "lock"
        with _explained(path):
            descriptor = open_in_place(path)
        return locked(descriptor, busy)

    @property
    def id(self) -> str:
        """Eight hex digits that tell this run from all others, also from those of the same question elsewhere."""
        path = self.path / "run_id"
        if not path.exists():
            self.write("run_id", secrets.token_hex(4) + "\n")
        with _explained(path):
            return read_regular(path).decode().strip()

    @property
    def storage(self) -> str:
        """URL of the Optuna study in this directory."""
        path = self.path.resolve() / "study.db"
        if path.exists() or path.is_symlink():
            with _explained(path):
                os.close(open_in_place(path))
        return f"sqlite:///{path}"

    @property
    def plan_path(self) -> Path:
        """Where the run's plan is written."""
        return self.path / "plan.yaml"

    @property
    def model(self) -> str:
        """The model by the name that the question gives it; empty where it does not."""
        workload = self.question.get("workload")
        return str((workload.get("model") if isinstance(workload, dict) else self.question.get("model")) or "")

    @property
    def job(self) -> str:
        """Batch and length, ``4×2048``: those that the question asks about, or the answer is for."""
        known, finished = self.question.get("workload") or {}, self.finished()
        if finished is not None:
            own = finished.outcome.settings
            known = {**known, **own, "seq_len": own.get("seq_len") or own.get("asked_seq_len")}
        return "×".join(str(known[name]) for name in ("batch_size", "seq_len") if known.get(name))

    def answer(self, trials: Sequence[Trial]) -> Trial | None:
        """Of the run's trials that of the plan that was named; before a search's end the fastest that fits."""
        with suppress(PlanError):
            if (plan := self.plan()) is not None:
                named = [trial for trial in trials if trial.plan_hash == plan.hash and trial.score is not None]
                return next(iter(named), None)
        return next(iter(ranking(trials)), None)

    def add_trial(self, trial: Trial) -> None:
        """Append a trial; what a killed process left of a line is cut off first.

        Of several lines with one number the last counts: a trial can be rewritten.
        """
        path = self.path / _TRIALS
        with _explained(path), os.fdopen(open_in_place(path), "a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(trial.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def trials(self) -> list[Trial]:
        """All trials by number. A last line torn by a kill is left out; any other damage raises RunDirectoryError."""
        path, found = self.path / _TRIALS, dict[int, Trial]()
        if not path.exists():
            return []
        with _explained(path):
            complete, _, _torn = read_regular(path).rpartition(b"\n")
        for number, line in enumerate(complete.splitlines(), 1):
            try:
                trial = Trial.model_validate_json(line)
            except ValidationError:
                raise RunDirectoryError(
                    f"{path}:{number}: this line is damaged",
                    remedy="Delete the line, or search with --fresh, which sets the whole directory aside.",
                ) from None
            found[trial.number] = trial
        return [found[n] for n in sorted(found)]

    def best(self, count: int = 1) -> list[Trial]:
        """The fastest plans that fit, fastest first; fewer where no more were tried."""
        return ranking(self.trials())[:count]

    def pareto_front(self) -> list[Trial]:
        """Trials that no other is both leaner and faster than, leanest first, whether they fit the budget or not."""
        return pareto_front(self.trials())

    def plan_of(self, number: int) -> Plan:
        """The plan of a trial. Raises RunDirectoryError for a number that the run does not have."""
        return plan_of_trial(self, trial_of(self, number))

    def in_flight(self) -> dict[str, int]:
        """How often a process ended while it measured a plan, by the plan's hash."""
        path = self.path / _IN_FLIGHT
        with _explained(path):
            return dict(json.loads(read_regular(path))) if path.exists() else {}

    def write_in_flight(self, plans: Mapping[str, int]) -> None:
        self.write(_IN_FLIGHT, json.dumps(plans))

    def dates(self) -> tuple[float, float]:
        """When the run began and when a trial was last written, in seconds since 1970, by its files."""
        paths = (self.path / name for name in (_QUESTION, _TRIALS))
        begun, last = (path.stat().st_mtime if path.exists() else 0.0 for path in paths)
        return begun, last or begun

    def add_command(self, command: Sequence[str]) -> None:
        """Keep a command line, ready to be pasted into a shell, without passwords; a repeated one is kept once."""
        line = shlex.join(map(without_passwords, command))
        known = self.command().splitlines()
        if line and line not in known:
            self.write("command.txt", "\n".join([*known, line]) + "\n")

    def command(self) -> str:
        """The command lines of this run, one per line."""
        path = self.path / "command.txt"
        with _explained(path):
            return read_regular(path).decode() if path.exists() else ""

    def write_environment(self, environment: Environment) -> None:
        self.write("environment.json", environment.model_dump_json(indent=2) + "\n")

    def environment(self) -> Environment | None:
        return self._model("environment.json", Environment)

    def write_profile(self, profile: Profile) -> None:
        self.write("profile.json", profile.model_dump_json() + "\n")

    def profile(self) -> Profile | None:
        return self._model("profile.json", Profile)

    def write_graph(self, graph: Graph, step: GraphName = "plain") -> None:
        """Write a traced step: the plain one, that of the plan, or that of recomputing everything."""
        # mtime 0, so that the same graph gives the same file
        self.write(_GRAPHS[step], gzip.compress(graph.model_dump_json(exclude_defaults=True).encode(), 5, mtime=0))

    def graph(self, step: GraphName = "plain") -> Graph | None:
        """A traced step; None where it was not written."""
        return self._model(_GRAPHS[step], Graph)

    def write_plan(self, plan: Plan) -> Path:
        """Write the run's answer over an earlier one of this run; anything else there is set aside."""
        path, ours = self.plan_path, False
        with suppress(Exception):  # what cannot be read, no search wrote
            found = Plan.load(path)
            ours = bool(found.hash) and found.status == found.source
        self.set_aside = plan.save(path, replace=ours) or self.set_aside
        return path

    def has_written(self, plan: Plan) -> bool:
        """Whether the run's plan file holds these choices, whatever else a person wrote into it."""
        with suppress(PlanError):
            return Plan.load(self.plan_path).expand_planned() == plan.expand_planned()
        return False

    def write_finished(self, finished: FinishedSearch) -> None:
        """Keep an answer, without the paths of its files, as the run may be moved."""
        paths = {"outcome": {"run_directory", "plan_path", "set_aside"}}
        self.write("outcome.json", finished.model_dump_json(exclude=paths) + "\n")

    def finished(self) -> FinishedSearch | None:
        """What was answered when a search came to its end; None while none has."""
        return self._model("outcome.json", FinishedSearch)

    def write_outlook(self, outlook: Outlook) -> None:
        self.write("outlook.json", outlook.model_dump_json() + "\n")

    def outlook(self) -> Outlook | None:
        """The ghost runs of other budgets; None where no search has ended."""
        return self._model("outlook.json", Outlook)

    def refusal(self) -> str:
        """Why the search found no plan, where it ended because nothing fits; else empty."""
        outlook = self.outlook() if self.finished() is None else None
        return outlook.infeasible if outlook is not None else ""

    def plan(self) -> Plan | None:
        """The run's answer, None where there is none yet. Raises PlanError where its file was damaged.

        With its sets of choices for smaller batches, where a search of several lengths has found some for it.
        """
        return Plan.load(self.plan_path) if self.plan_path.exists() else None

    def _model(self, name: str, model: type[M]) -> M | None:
        path = self.path / name
        if not path.exists():
            return None
        with _explained(path):
            raw = read_regular(path)
            return model.model_validate_json(gzip.decompress(raw) if name.endswith(".gz") else raw)

    def write(self, name: str, data: str | bytes) -> None:
        """Write a file of the run, whole or not at all."""
        with _explained(self.path / name):
            atomic_write(self.path / name, data)


def directory_name(model: str, device: str, budget: str, question: Mapping[str, Any]) -> str:
    """``llama-tiny_cpu_60pct-act_1a2b3c4d``: readable, safe on every file system, parts joined by underscores."""
    asked = [_slug(budget.replace("%act", "pct-act").replace("%", "pct"))] if budget else []
    return "_".join([short_name(model), _slug(device), *asked, question_hash(question)])


def short_name(model: str) -> str:
    """A model's name for files: a hub id as it is, what a path ends with, the folder of a ``config.json``.

    That of the folder which one is in, too: ``./config.json`` and ``.`` are called as it is.
    """
    parts = [model]
    if model.endswith(".json") or model.startswith(("/", ".", "~")):
        parts = [part for part in re.split(r"[/\\]", os.path.abspath(model)) if part] or parts
    if len(parts) > 1 and parts[-1] == "config.json":
        parts.pop()
    return _slug(parts[-1].removesuffix(".json"))


def _slug(text: str) -> str:
    cleaned = re.sub(r"[^A-Za-z0-9.]+", "-", text.rstrip("/\\")).strip("-.")
    return cleaned[-40:].strip("-.") or "x"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn errors of the system or a parser about a file into RunDirectoryError."""
    why, remedy = "", "Search with --fresh, which sets the directory aside, or restore the file."
    try:
        yield
    except (ValueError, TypeError, EOFError, RecursionError, gzip.BadGzipFile, zlib.error) as error:
        parts = first_violation(error) if isinstance(error, ValidationError) else str(error).splitlines()[:1]
        why = f"is damaged: {': '.join(filter(None, parts))}"
    except FileNotFoundError:
        why = "is missing"
    except OSError as error:
        why, remedy = f"cannot be used: {reason(error)}", "Check permissions, or give another folder with --out."
        if error.errno in FULL:
            remedy = "Free space there, and the same command continues; or give another folder with --out."
    if why:
        raise RunDirectoryError(f"{path} {why}", remedy=remedy)


# -- what the trials of a run say --------------------------------------------------------------------------------------


def ranking(trials: Sequence[Trial]) -> list[Trial]:
    """The plans that were measured (or simulated) and fit, fastest first."""
    fitting = (t for t in trials if t.feasible and t.score is not None)
    return sorted(fitting, key=lambda t: (t.score_seconds, t.number))


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Measured (or simulated) plans that no other is both leaner and faster than, leanest first.

    Over the budget or not: the front shows what another budget would buy. Of plans with equal numbers the first stays.
    """
    known = sorted((t for t in trials if t.score is not None), key=lambda t: t.number)
    return undominated(known, lambda t: (t.score.peak_bytes if t.score else math.inf, t.score_seconds))


def undominated(items: Iterable[T], cost: Callable[[T], tuple[float, float]]) -> list[T]:
    """Items that no other beats in bytes or seconds (their ``cost``) without losing in the other, leanest first.

    Of equal ones the first.
    """
    kept: list[T] = []
    for item in sorted(items, key=cost):
        if not kept or cost(item)[1] < cost(kept[-1])[1]:
            kept.append(item)
    return kept


# -- plans of runs and of single trials --------------------------------------------------------------------------------


def plan_at(path: Path) -> Plan:
    """The plan of a file, or of a run's directory. Raises RunDirectoryError for a run without one."""
    if not path.exists():
        remedy = "Check the path: it is that of a plan's file or of a run's directory, not a model's name."
        raise PlanError(f"there is no file {path}", remedy=remedy)
    if not path.is_dir():
        return Plan.load(path)
    run = RunDirectory.open(path)
    if (plan := run.plan()) is not None:
        return plan
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
    graph, answer = run.graph(), run.plan()
    if graph is None:
        raise RunDirectoryError(
            f"{run.path} has no traced step, so its plans cannot be written",
            remedy="Search again with --fresh.",
        )
    notes = (f"Trial {trial.number} of {run.path.name}, {trial.name}.",)
    if not trial.feasible:
        notes = (*notes, f"Not the answer of that run: {trial.state.replace('_', ' ')}.")
    asked: dict[str, Any] = {"workload": run.question.get("workload")}
    compiled = {"compile": run.question.get("compile")}
    heads = list[Unit]()  # which no traced step lists
    if answer is not None:
        asked = {name: getattr(answer, name) for name in _OF_THE_QUESTION}
        listed, classes = {unit.name for unit in graph.units}, answer.model.classes.items()
        extra = {name: cls for name, cls in classes if name in trial.choices and name not in listed}
        heads = [Unit(name=name, cls=cls, kind=0, role="head") for name, cls in extra.items()]
    return Plan.create(
        trial.choices,
        [*graph.units, *heads],
        model=answer.model.name if answer is not None else run.model,
        source="measured" if trial.measured else "simulated" if trial.predicted else "unmeasured",
        environment=run.environment(),
        predicted=trial.predicted,
        measured=trial.measured,
        notes=notes,
        **asked,
    ).model_copy(update=compiled)


open_run = RunDirectory.open
