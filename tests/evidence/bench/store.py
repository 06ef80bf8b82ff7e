"""The directory of one bench: a run's, with rows and rounds in place of trials.

<out>/bench-<model>_<device>_<hash of the question>/
    question.json   what was asked               rounds.jsonl    seconds by row, a line per round
    command.txt     every command line           report.json     all numbers, worked out
    rows.jsonl      a line per method            table.md        the same to be read
    settings.jsonl  what peers may be set to     searches/       the runs behind our plans
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autockpt.schema.runs import RunDirectory
from tests.evidence.bench.report import BenchRow


class BenchDirectory(RunDirectory):
    """One bench on disk."""

    prefix = "bench-"

    def rows(self) -> dict[str, BenchRow]:
        """Rows by key, in the order in which they came; of several lines for one row the last counts."""
        return {row.key: row for row in self.lines("rows.jsonl", BenchRow.model_validate_json)}

    def add_row(self, row: BenchRow) -> None:
        self.append("rows.jsonl", row.model_dump_json(exclude_defaults=True))

    def rounds(self) -> list[dict[str, float]]:
        """Seconds by row, of every round."""
        return list(self.lines("rounds.jsonl", json.loads))

    def add_round(self, seconds: Mapping[str, float]) -> None:
        self.append("rounds.jsonl", json.dumps({key: round(value, 6) for key, value in seconds.items()}))

    def settings(self, peer: str) -> list[Any] | None:
        """A peer's settings as they were found earlier, so that rows stay what they were; None: not yet."""
        found = [line["settings"] for line in self.lines("settings.jsonl", json.loads) if line["peer"] == peer]
        return found[-1] if found else None

    def add_settings(self, peer: str, settings: list[Any]) -> None:
        self.append("settings.jsonl", json.dumps({"peer": peer, "settings": settings}))
