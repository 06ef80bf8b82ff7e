"""The rows and sentences of answers and explanations, which the terminal and the page share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from autockpt.analysis.explanation import Alive, Basis, Explanation, Reach
from autockpt.schema import (
    Choice,
    Comparison,
    CompileMode,
    Measurement,
    Prediction,
    Remake,
    Selective,
    format_binary,
    words,
)

LONG = 46  # characters of a choice
_IN_OPTIMIZER = " The peak lies in the optimizer step, when no activations are left: no choice for them lowers it."


def choice_words(choice: Choice) -> str:
    """A choice with its options; a long list of what it keeps as its length."""
    text = str(choice)
    if len(text) <= LONG or not isinstance(choice, Remake | Selective):
        return text
    return f"{choice.kind} (keeps {words.counted(len(choice.keep), 'output')})"


def basis_mark(basis: Basis) -> str:
    """What stands before seconds that rest on no measurement of this device."""
    return "" if basis == "measured" else "~"


def place_words(a: Alive) -> str:
    """Where alike storages are: their units, the first of many runs named, and the module within."""
    runs = a.units.split(", ")
    units = a.units if len(runs) <= 2 else f"{runs[0]} and {len(runs) - 1} more runs"
    return ", ".join(p for p in (units, a.place) if p) or "the rest of the model"


def reason_words(answer: Explanation) -> list[str]:
    """Why the plan is what it is: what less and more memory would change."""
    why, tilde = answer.why, basis_mark(answer.basis)
    assert why is not None
    chosen = why.chosen
    by_ops = f"{tilde}{words.seconds(chosen.step_seconds)}{_over(chosen, tilde)}"
    if answer.measured_seconds is not None:
        took = words.seconds(answer.measured_seconds)
        lines = [f"A step took {took}, as measured with the plan. By the times of its ops, as all below: {by_ops}."]
    else:
        lines = [f"A step takes {by_ops}."]
    # rates of other hardware are no reason to doubt what was measured
    if why.best is not None and not (answer.basis == "nominal" and answer.measured_seconds is not None):
        saved, more = chosen.step_seconds - why.best.step_seconds, why.best.peak_bytes - chosen.peak_bytes
        needs = f"{format_binary(more)} more and fits the budget too" if more > 0 else "no more bytes"
        lines.append(
            f"By these times another plan, which needs {needs}, is {tilde}{words.seconds(saved)} faster a step "
            f"({words.share(saved / chosen.step_seconds)}): {difference(chosen.choices, why.best.choices)}."
        )
    if why.leaner is not None:
        lines.append(_step("The next plan below", why.leaner, chosen, tilde))
    else:
        lines.append("There is no leaner plan." + (_IN_OPTIMIZER if answer.curve.peak_phase == "optimizer" else ""))
    if why.faster is not None:
        lines.append(_step("The next faster plan", why.faster, chosen, tilde))
    return lines


def _over(reach: Reach, tilde: str) -> str:
    if not reach.overhead:  # not known, or that plan itself
        return ""
    return f", {tilde}{words.share(reach.overhead, signed=True)} against saving everything"


def _step(what: str, other: Reach, chosen: Reach, tilde: str) -> str:
    bytes_, seconds = other.peak_bytes - chosen.peak_bytes, other.step_seconds - chosen.step_seconds
    moved = f"{format_binary(abs(bytes_))} {'more' if bytes_ > 0 else 'less'}"
    side = "slower" if seconds >= 0 else "faster"
    if abs(seconds) < 5e-4 * chosen.step_seconds:
        time = f"is hardly {side}"
    else:
        time = f"is {tilde}{words.seconds(abs(seconds))} {side}"
        price = -seconds / bytes_ if bytes_ else 0.0  # of the next bytes in either direction
        time += f", {tilde}{words.seconds(price * 2**20)} per MiB" if price > 0 else ""
    return f"{what} needs {moved} and {time}: {difference(chosen.choices, other.choices)}."


def difference(before: Mapping[str, Choice], after: Mapping[str, Choice]) -> str:
    """What changes between two plans: ``3 layers from recompute to save``, the most first."""
    moves: dict[tuple[str, str], int] = {}
    for name in {**before, **after}:
        old, new = (choice_words(c[name]) if name in c else "save" for c in (before, after))
        if old != new:
            moves[old, new] = moves.get((old, new), 0) + 1
    ranked = sorted(moves.items(), key=lambda m: (-m[1], m[0]))
    parts = [f"{words.counted(n, 'layer')} from {old} to {new}" for (old, new), n in ranked[:3]]
    more = sum(n for _, n in ranked[3:])
    return (", ".join(parts) + (f", {more} more" if more else "")) if parts else "the same choices"


def speed_words(answer: Explanation) -> str:
    """Step time, FLOP/s, utilisation and tokens per second, as far as they are known; empty where none is."""
    speed, mark = answer.speed, "" if answer.measured_seconds is not None else basis_mark(answer.basis)
    if speed is None:
        return ""
    parts = [f"a step takes {mark}{words.seconds(speed.seconds)}"]
    if speed.flops:
        parts.append(f"{mark}{speed.flops / speed.seconds / 1e12:.3g} TFLOP/s")
    if speed.utilisation is not None and speed.model_flops:
        parts.append(f"{mark}{words.share(speed.utilisation)} model FLOPs utilisation")
    if speed.tokens is not None:
        parts.append(f"{mark}{speed.tokens / speed.seconds:,.0f} tokens/s")
    return ", ".join(parts)


@dataclass(frozen=True)
class AnswerRow:
    """One line of the table: a plan, what is known of it, and how that compares with the budget and with saving all.

    ``overhead`` is a share of extra step time, with its noise: measured, or else predicted. None: unknown.
    """

    plan: Comparison
    verdict: str
    known: Measurement | Prediction | None
    spare_bytes: int | None
    overhead: float | None
    overhead_noise: float
    overhead_predicted: bool
    note: str
    ours: bool


def answer_rows(rows: tuple[Comparison, ...], budget_bytes: int) -> list[AnswerRow]:
    """Work out spare bytes, and overhead over the row *none*: both measured where they are, else both predicted."""
    none = next((r for r in rows if r.name == "none"), None)
    return [_row(r, none, budget_bytes, ours=r is rows[-1]) for r in rows]


def _row(row: Comparison, none: Comparison | None, budget_bytes: int, ours: bool) -> AnswerRow:
    known, verdict = row.measured or row.predicted, row.verdict
    if verdict == "not_measured" and known is not None:  # it fits as far as its ghost run says
        verdict = "over_budget" if known.peak_bytes > budget_bytes else "simulated"
    here, base, noise, predicted = row.predicted, none.predicted if none is not None else None, 0.0, True
    if row.measured is not None and none is not None and none.measured is not None:
        here, base, predicted = row.measured, none.measured, False
        noise = math.hypot(here.noise, base.noise)
    overhead = None
    if row is not none and here is not None and base is not None and here.step_seconds and base.step_seconds:
        overhead = here.step_seconds / base.step_seconds - 1
    spare = budget_bytes - known.peak_bytes if known is not None else None
    note = "; ".join(filter(None, (row.note, words.by_rank(row.measured))))
    return AnswerRow(row, verdict, known, spare, overhead, noise, predicted, note, ours)


def loading_lines(path: str, compiled: CompileMode | None = None) -> tuple[str, ...]:
    """The lines that load a plan; ``compiled``: how its steps are, which is the script's to do."""
    applied = f"handle = autockpt.apply(model, {json.dumps(path, ensure_ascii=False)})"
    return ("import autockpt", applied, "print(handle)", *([_COMPILING[compiled]] if compiled else []))


_COMPILING: dict[CompileMode, str] = {
    "layers": "# and compile each layer, as its steps were when they were measured: layer.compile()",
    "model": "model.compile()  # as its steps were when they were measured",
}
