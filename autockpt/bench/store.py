"""The directory of one bench: rows and rounds as they come, so that Ctrl-C or a kill loses nothing.

<out>/bench-<model>_<device>_<hash of the question>/
    question.json   what was asked               rounds.jsonl    seconds by row, a line per round
    command.txt     every command line           report.json     all numbers, worked out
    rows.jsonl      a line per method            table.md        the same to be read
    searches/       the runs behind our plans    picture.svg     peak against step time
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autockpt.errors import RunDirectoryError
from autockpt.history.lock import exclusive
from autockpt.history.rundir import short_name
from autockpt.schema.bench import BenchReport, BenchRow
from autockpt.schema.files import atomic_write, open_regular, read_regular, reason, set_aside
from autockpt.schema.request import question_hash

_REMEDY = "Use --fresh, which sets the directory aside, or restore the file."


class BenchDirectory:
    """One bench on disk. Raises RunDirectoryError with a remedy where a file cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    @contextmanager
    def enter(
        cls, root: Path, question: Mapping[str, Any], *, model: str, device: str, fresh: bool
    ) -> Iterator[BenchDirectory]:
        """The directory of this question under ``root``, made where it is missing, held against a second bench.

        ``fresh`` renames an earlier one to ``….1`` first.
        """
        self = cls(root / f"bench-{short_name(model)}_{device}_{question_hash(question)}")
        with _explained(self.path):
            if fresh and self.path.exists():
                with exclusive(self.path / "lock"):
                    pass
                set_aside(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
        with exclusive(self.path / "lock"):
            self.write("question.json", json.dumps(question, indent=2, sort_keys=True) + "\n")
            yield self

    def rows(self) -> dict[str, BenchRow]:
        """Rows by key, in the order in which they came; of several lines for one row the last counts."""
        return {row.key: row for row in map(BenchRow.model_validate, self._lines("rows.jsonl"))}

    def add_row(self, row: BenchRow) -> None:
        self._append("rows.jsonl", row.model_dump(mode="json", exclude_defaults=True))

    def rounds(self) -> list[dict[str, float]]:
        """Seconds by row, of every round."""
        return [{str(k): float(v) for k, v in line.items()} for line in self._lines("rounds.jsonl")]

    def add_round(self, seconds: Mapping[str, float]) -> None:
        self._append("rounds.jsonl", {key: round(value, 6) for key, value in seconds.items()})

    def settings(self, peer: str) -> list[Any] | None:
        """A peer's settings as they were found earlier, so that rows stay what they were; None: not yet."""
        found = [line["settings"] for line in self._lines("settings.jsonl") if line["peer"] == peer]
        return found[-1] if found else None

    def add_settings(self, peer: str, settings: list[Any]) -> None:
        self._append("settings.jsonl", {"peer": peer, "settings": settings})

    def add_command(self, line: str) -> None:
        """Keep a command line; a repeated one is kept once."""
        path = self.path / "command.txt"
        with _explained(path):
            known = read_regular(path).decode().splitlines() if path.exists() else []
        if line and line not in known:
            self.write("command.txt", "\n".join([*known, line]) + "\n")

    def write_report(self, report: BenchReport) -> None:
        self.write("report.json", report.model_dump_json(indent=1, exclude={"directory"}) + "\n")

    def write(self, name: str, text: str) -> None:
        with _explained(self.path / name):
            atomic_write(self.path / name, text)

    def _append(self, name: str, data: Mapping[str, Any]) -> None:
        path = self.path / name
        with _explained(path):
            torn = path.exists() and path.stat().st_size and not read_regular(path).endswith(b"\n")
            with os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", encoding="utf-8") as file:
                file.write(("\n" if torn else "") + json.dumps(data) + "\n")

    def _lines(self, name: str) -> Iterator[Any]:
        """What was appended. A line torn by a kill is left out: it is what is not JSON."""
        path = self.path / name
        if not path.exists():
            return
        with _explained(path):
            lines = read_regular(path).decode().splitlines()
        for line in lines:
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                continue


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be used: {reason(error)}", remedy=_REMEDY) from None
