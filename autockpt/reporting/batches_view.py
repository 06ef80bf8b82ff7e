"""``autockpt search --global-batch`` on screen: the sizes side by side, then the answer of the best one."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from autockpt.reporting.answer import print_answer
from autockpt.reporting.style import heading, plain_table, remarks, simulated
from autockpt.schema import Measurement, format_binary, words
from autockpt.schema.batches import BatchAnswer, BatchSetting

_ROLES = {"found": "", "given": "as given", "usual": "largest batch, all recomputed"}


def print_batches(answer: BatchAnswer, console: Console) -> None:
    """Print the best setting's whole answer, all settings by tokens per second, and the trainers' flags."""
    print_answer(answer.outcome, console)
    best = answer.best
    table = plain_table(">batch", ">×", "<plan", ">peak", ">update", f">{answer.unit}/s", ">of best")
    table.add_row(*_cells(best, best), style="bold")
    for setting in answer.others:
        table.add_row(*_cells(setting, best))
    heading(f"{answer.rows_per_update} rows per update: which micro-batch", console, table)
    if not isinstance(best.score, Measurement):
        console.print(simulated(answer.outcome.step_note))
    counted = f"The trials above are those of micro-batches of {best.batch_size}; "
    counted += f"{answer.trials} of all sizes, in {words.seconds(answer.seconds)}."
    remarks([counted, *answer.notes], console)
    heading("The settings that go with the plan:", console)
    for trainer, flags in _trainer_flags(best.batch_size, best.accumulate).items():
        console.print(Text(f"  {trainer:<14}{flags}", style="cyan"), soft_wrap=True)


def batch_lines(answer: BatchAnswer) -> list[str]:
    """The same in a few lines of text, the best setting first: for a log."""
    lines = []
    for setting in (answer.best, *answer.others):
        batch, times, plan, peak, seconds, rate, share = _cells(setting, answer.best)
        lines.append(f"{batch} × {times}: {rate} {answer.unit}/s ({share}), update {seconds}, peak {peak}, {plan}")
    return lines


def _cells(setting: BatchSetting, best: BatchSetting) -> list[str]:
    mark = "" if isinstance(setting.score, Measurement) else "~"
    role = _ROLES[setting.role]
    return [
        str(setting.batch_size),
        str(setting.accumulate),
        f"{setting.plan} ({role})" if role else setting.plan,
        f"{mark}{format_binary(setting.score.peak_bytes)}",
        words.step_of(setting.score),
        f"{mark}{setting.per_second:,.0f}",
        f"{setting.per_second / best.per_second:.0%}",
    ]


def _trainer_flags(batch_size: int, accumulate: int) -> dict[str, str]:
    """What trainers are given, on one device: micro-batch and accumulation by their own names."""
    rows = batch_size * accumulate
    return {
        "transformers": f"--per_device_train_batch_size {batch_size} --gradient_accumulation_steps {accumulate}",
        "axolotl": f"--micro-batch-size {batch_size} --gradient-accumulation-steps {accumulate}",
        "torchtitan": f"--training.local_batch_size {batch_size} --training.global_batch_size {rows}",
    }
