"""A rule of thumb, whose it is, and what becomes of it on one model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autockpt.schema import format_binary, words
from autockpt.schema.base import Facts

FACTOR_TOLERANCE = 0.05


@dataclass(frozen=True)
class Reading:
    """What a rule's plan does: shares of bytes saved and of step time added; None where that is not known."""

    peak_saved: float | None = None
    """Of the save-everything peak."""
    activations_saved: float | None = None
    """Of the activations and transients at that peak."""
    time_added: float | None = None
    factor: float | None = None
    """FLOPs of a step in forwards, for rules about those."""
    amount: float | None = None
    """In the rule's ``unit``, for rules about an amount."""


@dataclass(frozen=True)
class Rule:
    """A rule of thumb. Ranges are (from, to); ``amount`` is what it comes to for this model."""

    name: str
    source: str
    says: str
    address: str = ""
    memory: tuple[float, float] | None = None
    of: Literal["activations", "peak"] = "activations"
    time: tuple[float, float] | None = None
    factor: float | None = None
    amount: tuple[float, float] | None = None
    unit: Literal["bytes", "times", "layers"] = "times"
    predicted: Reading | None = None
    note: str = ""

    def misses(self, reading: Reading | None) -> tuple[str, ...] | None:
        """What of the rule a reading does not keep, in words; empty where it holds.

        It holds with at least that memory saved, at most that time added, that factor, and an amount within what it
        says. None where nothing that it promises is known.
        """
        if reading is None:
            return None
        saved = reading.peak_saved if self.of == "peak" else reading.activations_saved
        known: list[tuple[str, bool]] = []
        if self.memory is not None and saved is not None:
            known.append(("saves less", saved < self.memory[0]))
        if self.time is not None and reading.time_added is not None:
            known.append(("takes longer", reading.time_added > self.time[1]))
        if self.factor is not None and reading.factor is not None:
            ratio = reading.factor / self.factor
            known.append(("more work", ratio > 1 + FACTOR_TOLERANCE))
            known.append(("less work", ratio < 1 - FACTOR_TOLERANCE))
        if self.amount is not None and reading.amount is not None:
            known.append(("more", reading.amount > self.amount[1]))
            known.append(("less", reading.amount < self.amount[0]))
        return tuple(word for word, missed in known if missed) if known else None


@dataclass(frozen=True)
class Rules:
    """Rules of thumb put to the test: what is ``predicted`` rests on ghost runs and op times."""

    model: str
    settings: Facts
    device: str
    basis_note: str
    save_all_peak: int
    activation_bytes: int
    rules: tuple[Rule, ...]
    notes: tuple[str, ...] = ()


def table(found: Rules) -> str:
    """The rules as a Markdown table, with what its numbers rest on."""
    peak, activations = format_binary(found.save_all_peak), format_binary(found.activation_bytes)
    lines = [
        f"## {found.model} on {found.device}",
        "",
        f"{words.job(found.settings)}. Saving everything peaks at {peak}; {activations} of it are activations and "
        f"transients. About seconds: {found.basis_note}.",
        "",
        "| rule | source | says | predicted |",
        "|---|---|---|---|",
    ]
    for rule in found.rules:
        source = f"[{rule.source}]({rule.address})" if rule.address else rule.source
        predicted = _read(rule, rule.predicted) or rule.note
        cells = (rule.name, source, _promise(rule), predicted)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *("", *(f"- {note}" for note in found.notes)) * bool(found.notes)])


def _promise(rule: Rule) -> str:
    """What a rule says, what that comes to for this model, and a word on it."""
    parts = [rule.says]
    if rule.amount is not None:
        low, high = (_amount(value, rule.unit) for value in rule.amount)
        between = f"{low} to {high}" if low != high else low
        parts.append(f"here {between if rule.amount[0] else f'at most {high}'}")
    if rule.note and rule.predicted is not None:
        parts.append(rule.note)
    return "; ".join(parts)


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return format_binary(round(value))
    return f"{value:.3g} {'layers' if unit == 'layers' else '×'}"


def _read(rule: Rule, reading: Reading | None) -> str:
    """A reading in the rule's own terms, and whether the rule holds; empty where nothing is known."""
    if reading is None:
        return ""
    parts = []
    if reading.factor is not None:
        parts.append(f"{reading.factor:.2f} forwards")
    if rule.amount is not None and reading.amount is not None:
        parts.append(_amount(reading.amount, rule.unit))
    saved = reading.peak_saved if rule.of == "peak" else reading.activations_saved
    if rule.memory is not None and saved is not None:
        parts.append(f"{words.share(saved)} less")
    if reading.time_added is not None and rule.factor is None:
        parts.append(f"{words.share(reading.time_added, signed=True)} time")
    misses = rule.misses(reading)
    verdict = [] if misses is None else [f"**no**: {', '.join(misses)}"] if misses else ["holds"]
    return "; ".join([", ".join(parts), *verdict])
