"""Many runs side by side: what each was asked and what it answered, for the table and the page of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autockpt.errors import RunDirectoryError
from autockpt.schema import Trial
from autockpt.schema.base import Data
from autockpt.schema.files import write_file
from autockpt.schema.runs import RunDirectory

INDEX = "index.html"


class InShort(Data):
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


def in_short(path: Path) -> InShort:
    """The run in a directory; a damaged one says what is wrong with it."""
    try:
        run = RunDirectory.open(path)
        environment, trials, refusal = run.environment(), run.trials(), run.refusal()
        return InShort(
            path=path,
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
        return InShort(path=path, damaged=error.message)


def write_index(folder: Path, runs: Sequence[InShort]) -> Path:
    """Write index.html into a folder: a sortable table of these runs, with links to their pages. Returns its path.

    Raises RunDirectoryError where it cannot be written.
    """
    from autockpt.analysis.page import PAGE, templates

    rows = [(run, str((run.path / PAGE).relative_to(folder)) if (run.path / PAGE).exists() else "") for run in runs]
    page = templates().get_template("folder.html.j2").render(folder=folder.resolve().name, rows=rows)
    return write_file(folder / INDEX, page, RunDirectoryError, "Move away what is in its place.")
