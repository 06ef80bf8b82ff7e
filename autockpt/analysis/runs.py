"""Many runs side by side: what each was asked and what it answered, for the table and the page of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autockpt.errors import RunDirectoryError
from autockpt.schema import Trial, words
from autockpt.schema.files import write_file
from autockpt.schema.runs import RunDirectory

INDEX = "index.html"


@dataclass(frozen=True)
class InShort:
    """One run: its question in a few words, and its answer. ``infeasible`` and ``damaged`` say why it has none."""

    path: Path
    date: float = 0.0
    model: str = ""
    on: str = ""
    budget: str = ""
    job: str = ""
    trials: int = 0
    answer: Trial | None = None
    infeasible: str = ""
    damaged: str = ""

    @property
    def state(self) -> str:
        """Why there is no answer, in two words."""
        return "damaged" if self.damaged else "nothing fits" if self.infeasible else "none yet"

    def as_json(self, folder: Path) -> dict[str, Any]:
        """Plain values; None for what is not known."""
        score = self.answer.score if self.answer is not None else None
        return {
            "run": str(self.path.relative_to(folder)),
            "date": words.when(self.date) if self.date else None,
            **{name: getattr(self, name) or None for name in ("model", "on", "budget", "job", "infeasible", "damaged")},
            "trials": self.trials,
            "state": self.answer.state if self.answer is not None else None,
            "plan_hash": self.answer.plan_hash if self.answer is not None else None,
            **{name: getattr(score, name, None) for name in ("peak_bytes", "step_seconds", "noise", "host_bytes")},
        }


def in_short(path: Path) -> InShort:
    """The run in a directory; a damaged one says what is wrong with it."""
    try:
        run = RunDirectory.open(path)
        environment, trials, refusal = run.environment(), run.trials(), run.refusal()
        return InShort(
            path,
            date=run.dates()[1],
            model=run.model,
            on=environment.device.name if environment is not None else "",
            budget=str(run.question.get("budget") or ""),
            job=run.job,
            trials=len(trials),
            answer=None if refusal else run.answer(trials),
            infeasible=refusal.partition("\n")[0],
        )
    except RunDirectoryError as error:
        return InShort(path, damaged=error.message)


def write_index(folder: Path, runs: Sequence[InShort]) -> Path:
    """Write index.html into a folder: a sortable table of these runs, with links to their pages. Returns its path.

    Raises RunDirectoryError where it cannot be written.
    """
    from autockpt.analysis.page import PAGE, templates

    rows = [(run, str((run.path / PAGE).relative_to(folder)) if (run.path / PAGE).exists() else "") for run in runs]
    page = templates().get_template("folder.html.j2").render(folder=folder.resolve().name, rows=rows)
    return write_file(folder / INDEX, page, RunDirectoryError, "Move away what is in its place.")
