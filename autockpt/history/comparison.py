"""What two runs have been asked differently, and the plans that both tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autockpt.schema.trial import Trial


def differences(first: Any, second: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """What two questions differ in: the dotted name of each entry, and what it is in either (``—`` for nothing).

    Of two devices with names of their own, the names say it all.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping) and first.get("name") == second.get("name"):
        for key in sorted({*first, *second}, key=str):
            yield from differences(first.get(key), second.get(key), f"{name}.{key}" if name else str(key))
    elif first != second:
        yield name, _written(first), _written(second)


def _written(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value:
        return str(value["name"])
    return "—" if value is None else str(value)


def in_both(first: Sequence[Trial], second: Sequence[Trial]) -> list[tuple[Trial, Trial]]:
    """Plans that both runs have numbers of, by the first's."""
    known = {trial.plan_hash: trial for trial in second if trial.score is not None}
    return [(t, known[t.plan_hash]) for t in first if t.score is not None and t.plan_hash in known]
