"""``autockpt estimate``: does it fit, with what plan, how fast; a table for models, cards, batches and lengths."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from autockpt.cli.guard import guarded, progress, results
from autockpt.cli.options import arg, flag, listed, opt
from autockpt.errors import UsageError
from autockpt.progress import listener
from autockpt.schema import Estimate, format_binary, words
from autockpt.schema.sizes import SIMULATED_HEADROOM
from autockpt.terminal import simulated

_WIDTHS = (14, 12, 12, 8, 5, 11, 10)
_TITLES = ("model", "card", "batch", "trains", "fits", "peak", "step")


@guarded
def estimate(
    models: list[str] = arg("MODEL", "As for --model of `autockpt search`.", default=...),
    *,
    cards: str = opt("--cards A,B", "Described devices: rtx4090, h100, …, or YAML files.", default="rtx4090"),
    batch_sizes: str = opt("--batch-sizes N,M", "Sequences per micro-batch.", default="1"),
    seq_lens: str = opt("--seq-lens N,M", "Tokens of a sequence.", default="2048"),
    lora: int = opt("--lora RANK", "Rank of LoRA adapters; 0 leaves these rows out.", default=16, min=0),
    full: bool = opt("--full/--no-full", "Rows that train all weights.", default=True),
    qlora: bool = opt("--qlora/--no-qlora", "Rows that train LoRA adapters on a base in 4 bits (QLoRA).", default=True),
    dtype: str | None = opt("--dtype TYPE", "Type of the weights: bf16, fp16, fp32. Default: the model's."),
    as_json: bool = flag("--json", "Print JSON, one object per line."),
) -> None:
    """Predict whether training fits a card, with what plan, and how fast.

    Prints a row for every model, card, batch size and length: for full training with AdamW, for LoRA adapters, and for
    these on a base in 4 bits (QLoRA). Everything is simulated, nothing is measured, and no weights are loaded. Plans
    choose for whole layers; `autockpt search --hardware` evaluates finer choices for one row, which can only be faster.
    The exit code is 0 also where nothing fits.
    """
    from autockpt.tuning import estimate as estimated

    kind: Any = dtype
    rows = estimated(
        models,
        cards=listed(cards),
        batch_sizes=_numbers("--batch-sizes", batch_sizes),
        seq_lens=_numbers("--seq-lens", seq_lens),
        lora=lora,
        full=full,
        qlora=qlora,
        dtype=kind,
        watch=lambda _: listener(progress()),
    )
    if as_json:
        for row in rows:
            print(row.model_dump_json(exclude_none=True), flush=True)
        return
    print_estimates(rows, results())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Positive whole numbers from ``1,2,4``. Raises UsageError for anything else."""
    entries = listed(text)
    if not entries or not all(entry.isdecimal() and len(entry) < 9 and int(entry) for entry in entries):
        raise UsageError(f"{option} {text}: not a list of whole numbers", remedy=f"Write {option} 1,2,4.")
    return tuple(map(int, entries))


def print_estimates(estimates: Iterable[Estimate], console: Console) -> None:
    """A line for each estimate as soon as there is one, and its plan beneath. Simulated figures bear a ``~``."""
    console.print(Text(_line(_TITLES), style="bold"), soft_wrap=True)
    notes: dict[str, None] = {}
    for estimate in estimates:
        notes |= {estimate.step_note: None} if estimate.step_note else {}
        console.print(Text(_line(_cells(estimate))), soft_wrap=True)
        if text := _plan_words(estimate):
            console.print(Padding.indent(Text(text, style="dim"), 4))
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


def _plan_words(estimate: Estimate) -> str:
    """The plan in words; nothing where everything is saved. And what does not grow with batch and length."""
    if estimate.note:
        return estimate.note
    plan = ", ".join(f"{count} {kind}" for kind, count in estimate.choices.items())
    text = plan if estimate.fits else "the leanest plan needs that much"
    return "; ".join(filter(None, (text, estimate.remark)))


def _line(texts: tuple[str, ...]) -> str:
    """Texts in their columns; one that is too long moves the rest to the right."""
    return " ".join(text.ljust(width) for text, width in zip(texts, _WIDTHS, strict=True)).rstrip()
