"""``autockpt estimate``: does it fit, with what plan, how fast; a table for models, cards, batches and lengths."""

from __future__ import annotations

from typing import Any

from autockpt.cli import screen
from autockpt.cli.guard import guarded
from autockpt.cli.options import arg, flag, listed, opt
from autockpt.errors import UsageError


@guarded
def estimate(
    models: list[str] = arg("MODEL", "As for --model of `autockpt search`.", default=...),
    *,
    cards: str = opt("--cards A,B", "Described devices: rtx4090, h100, …, or YAML files.", default="rtx4090"),
    batch_sizes: str = opt("--batch-sizes N,M", "Sequences per micro-batch.", default="1"),
    seq_lens: str = opt("--seq-lens N,M", "Tokens of a sequence.", default="2048"),
    lora: int = opt("--lora RANK", "Rank of the LoRA rows; 0 leaves them out.", default=16, min=0),
    full: bool = opt("--full/--no-full", "Rows that train all weights.", default=True),
    qlora: bool = opt("--qlora/--no-qlora", "LoRA rows again on a base in 4 bits.", default=True),
    prepare_kbit: bool = flag(
        "--prepare-kbit/--no-prepare-kbit", "4-bit rows with norms, embeddings and head in fp32, as PEFT's."
    ),
    dtype: str | None = opt("--dtype TYPE", "Type of the weights: bf16, fp16, fp32. Default: the model's."),
    as_json: bool = flag("--json", "Print JSON, one object a line."),
) -> None:
    """Predict whether training fits a card, with what plan, and how fast.

    Prints a row for every model, card, batch size and length: for full training with AdamW, for LoRA adapters, and for
    these on a base in 4 bits (QLoRA). Everything is simulated, nothing is measured, and no weights are loaded. Plans
    choose for whole layers; `autockpt search --hardware` evaluates finer choices for one row, which can only be faster.
    The exit code is 0 also where nothing fits.
    """
    from autockpt.progress import listener
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
        prepare_kbit=prepare_kbit,
        dtype=kind,
        watch=lambda _: listener(screen.progress()),
    )
    if as_json:
        for row in rows:
            print(row.model_dump_json(exclude_none=True), flush=True)
        return
    from autockpt.cli.estimate_table import print_estimates

    print_estimates(rows, screen.results())


def _numbers(option: str, text: str) -> tuple[int, ...]:
    """Positive whole numbers from ``1,2,4``. Raises UsageError for anything else."""
    entries = listed(text)
    if not entries or not all(entry.isdecimal() and len(entry) < 9 and int(entry) for entry in entries):
        raise UsageError(f"{option} {text}: not a list of whole numbers", remedy=f"Write {option} 1,2,4.")
    return tuple(map(int, entries))
