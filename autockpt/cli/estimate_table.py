"""Estimates as a table that is printed row by row, as the rows come."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from autockpt.schema import Estimate, format_binary, words
from autockpt.schema.sizes import SIMULATED_HEADROOM
from autockpt.terminal import simulated

_WIDTHS = (14, 12, 12, 8, 5, 11, 10)
_TITLES = ("model", "card", "batch", "trains", "fits", "peak", "step")


def print_estimates(estimates: Iterable[Estimate], console: Console) -> None:
    """A line for each estimate as soon as there is one, and its plan beneath. Simulated figures bear a ``~``."""
    console.print(Text(_line(_TITLES), style="bold"), soft_wrap=True)
    notes: dict[str, None] = {}
    for estimate in estimates:
        notes |= {estimate.step_note: None} if estimate.step_note else {}
        console.print(Text(_line(_cells(estimate))), soft_wrap=True)
        if said := _said(estimate):
            console.print(Padding.indent(Text(said, style="dim"), 4))
    console.print(Text(f"Peaks with context and allocator, {SIMULATED_HEADROOM} of a card left free", style="dim"))
    console.print(simulated(" ".join(notes)))


def _cells(estimate: Estimate) -> tuple[str, ...]:
    """Model, card, batch, what trains, whether it fits, peak (the least one where nothing fits), step time."""
    fits = "?" if estimate.note else "~yes" if estimate.fits else "~no"
    peak = estimate.peak_bytes if estimate.fits else estimate.smallest_peak
    return (
        estimate.model,
        estimate.card,
        "×".join(str(size) for size in (estimate.batch_size, estimate.seq_len) if size is not None),
        f"{'Q' * estimate.load_in_4bit}LoRA {estimate.lora}" if estimate.lora else "full",
        fits,
        f"~{format_binary(peak)}" if peak else "",
        f"~{words.seconds(estimate.step_seconds)}" if estimate.step_seconds else "",
    )


def _said(estimate: Estimate) -> str:
    """The plan in words; nothing where everything is saved. And what does not grow with batch and length."""
    if estimate.note:
        return estimate.note
    plan = ", ".join(f"{count} {kind}" for kind, count in estimate.choices.items())
    said = plan if estimate.fits else "the leanest plan needs that much"
    return "; ".join(filter(None, (said, estimate.remark)))


def _line(texts: tuple[str, ...]) -> str:
    """Texts in their columns; one that is too long moves the rest to the right."""
    return " ".join(text.ljust(width) for text, width in zip(texts, _WIDTHS, strict=True)).rstrip()
