"""The comparison of a plan with the well-known ones, worked out; the terminal and the page print it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from autockpt.schema import Comparison, CompileMode, words


@dataclass(frozen=True)
class AnswerRow:
    """One line of the table, worked out: bytes, seconds and ratios, None where unknown."""

    name: str
    verdict: str
    peak_bytes: int | None
    simulated: bool
    headroom_bytes: int | None
    step: str
    overhead: float | None
    overhead_noise: float
    overhead_predicted: bool
    predicted_bytes: int | None
    predicted_seconds: float | None
    ours: bool
    note: str = ""
    host_bytes: int = 0


def answer_rows(rows: tuple[Comparison, ...], budget_bytes: int) -> list[AnswerRow]:
    """Work out headroom, and overhead over the row *none*: both measured where they are, else both predicted."""
    none = next((r for r in rows if r.name == "none"), None)
    return [_row(r, none, budget_bytes, ours=r is rows[-1]) for r in rows]


def _row(row: Comparison, none: Comparison | None, budget_bytes: int, ours: bool) -> AnswerRow:
    predicted, measured = row.predicted, row.measured
    known, verdict = measured or predicted, row.verdict
    if verdict == "not_measured" and known is not None:  # it fits as far as its ghost run says
        verdict = "over_budget" if known.peak_bytes > budget_bytes else "simulated"
    both_measured = bool(measured and none and none.measured)
    return AnswerRow(
        name=row.name,
        verdict=verdict,
        peak_bytes=known.peak_bytes if known else None,
        simulated=measured is None,
        headroom_bytes=budget_bytes - known.peak_bytes if known else None,
        step=words.step_of(known),
        overhead=_overhead(row, none, both_measured),
        overhead_noise=math.hypot(measured.noise, none.measured.noise) if measured and none and none.measured else 0.0,
        overhead_predicted=not both_measured,
        predicted_bytes=predicted.peak_bytes if predicted else None,
        predicted_seconds=predicted.step_seconds if predicted else None,
        ours=ours,
        note=row.note,
        host_bytes=known.host_bytes if known else 0,
    )


def _overhead(row: Comparison, none: Comparison | None, both_measured: bool) -> float | None:
    """Share of extra step time over saving everything; None for the row itself and where a number is missing."""
    if none is None or row is none:
        return None
    ours, base = (row.measured, none.measured) if both_measured else (row.predicted, none.predicted)
    if ours is None or base is None or not ours.step_seconds or not base.step_seconds:
        return None
    return ours.step_seconds / base.step_seconds - 1


def loading_lines(path: str, compiled: CompileMode | None = None) -> tuple[str, ...]:
    """The lines that load a plan; ``compiled``: how its steps are, which is the script's to do."""
    applied = f"handle = autockpt.apply(model, {json.dumps(path, ensure_ascii=False)})"
    return ("import autockpt", applied, "print(handle)", *([_COMPILING[compiled]] if compiled else []))


_COMPILING: dict[CompileMode, str] = {
    "layers": "# and compile each layer, as its steps were when they were measured: layer.compile()",
    "model": "model.compile()  # as its steps were when they were measured",
}
