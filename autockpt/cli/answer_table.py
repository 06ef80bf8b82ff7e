"""The answer of a search on screen: the plan compared with the well-known ones, and how to load it."""

from __future__ import annotations

import shlex
from textwrap import fill

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autockpt.analysis.answer import AnswerRow, answer_rows, loading_lines
from autockpt.schema import Measurement, Plan, SearchOutcome, format_binary, format_bytes, words
from autockpt.schema.batches import BatchAnswer
from autockpt.schema.known import legend_of_names
from autockpt.schema.plan import choice_lines, set_lines
from autockpt.terminal import VERDICTS, heading, plain_table, print_legend, remarks, simulated

SHORT = 14  # a note of up to this many characters stands next to the plan's name, a longer one under the table


def print_answer(outcome: SearchOutcome, console: Console) -> None:
    """Print the whole answer: job, budget, table, notes, the plan and the lines that load it."""
    console.print(_heading(outcome))
    rows = answer_rows(outcome.rows, outcome.budget.bytes)
    if rows:
        console.print()
        console.print(answer_table(rows))
        if any(r.predicted_bytes is not None for r in rows) or outcome.step_note:
            console.print(simulated(outcome.step_note))
        console.print(Text("; ".join(legend_of_names(row.name for row in rows))), style="dim")
    remarks(_remarks(outcome, rows), console)
    if outcome.plan is not None:
        _print_plan(outcome, outcome.plan, console)


def answer_table(rows: list[AnswerRow]) -> Table:
    """The comparison; what was predicted stands under what was measured."""
    host = any(row.host_bytes for row in rows)  # where something is offloaded
    columns = ["<plan", "fits", ">peak", ">headroom", ">step", ">overhead", *([">host"] if host else [])]
    table = plain_table(*columns)
    for row in rows:
        table.add_row(*_cells(row)[: len(columns)], style="bold" if row.ours else None)
    return table


def _cells(row: AnswerRow) -> list[Text | str]:
    word, colour = VERDICTS.get(row.verdict, (row.verdict, ""))
    name, peak, step, overhead = Text(row.name), Text("—"), Text(row.step), Text("—")
    if row.note and len(row.note) <= SHORT:
        name.append(f"\n{row.note}", style="dim not bold")
    if row.peak_bytes is not None:
        size = format_binary(row.peak_bytes)
        over = row.simulated and row.verdict in ("over_budget", "out_of_memory")
        peak = Text(f"does not fit\n(simulated {size})" if over else f"simulated {size}" if row.simulated else size)
    if not row.simulated and row.predicted_bytes is not None:
        peak.append(f"\n~{format_binary(row.predicted_bytes)}", style="dim not bold")
    if not row.simulated and row.predicted_seconds is not None:
        step.append(f"\n~{words.seconds(row.predicted_seconds)}", style="dim not bold")
    if row.overhead is not None:
        overhead = Text(f"{'~' if row.overhead_predicted else ''}{words.share(row.overhead, signed=True)}")
        if 0 < row.overhead_noise < words.USELESS_NOISE:
            overhead.append(f"\n±{words.share(row.overhead_noise)}")
    headroom = "—" if row.headroom_bytes is None else format_binary(row.headroom_bytes)
    host = format_binary(row.host_bytes) if row.host_bytes else "—"
    return [name, Text(word, style=colour), peak, headroom, step, overhead, host]


def _heading(outcome: SearchOutcome) -> Text:
    text = Text()
    model = outcome.plan.model.name if outcome.plan else outcome.settings.get("model")
    text.append(f"{model} " if model else "", style="bold")
    text.append(f"on {outcome.device.name}")
    if outcome.source == "simulated" and not outcome.dry_run:
        text.append(" (simulated)")
    if facts := words.facts({k: v for k, v in outcome.settings.items() if k != "model"}):
        text.append(f"\n{facts}", style="dim")
    budget = outcome.budget
    less = f" less a headroom of {budget.headroom}" if budget.headroom else ""
    text.append(f"\nBudget {budget.asked}{less}: {format_bytes(budget.bytes)}")
    if budget.covers:
        text.append(f", for {budget.covers}", style="dim")
    if outcome.plan is not None and (host := outcome.plan.host_budget_bytes) is not None:
        text.append(f"\nHost budget: {format_bytes(host)}")
    return text


def _remarks(outcome: SearchOutcome, rows: list[AnswerRow]) -> list[str]:
    """What the table does not say."""
    said = []
    if outcome.interrupted:
        so_far = "this is the best so far" if outcome.plan else "nothing that fits was measured yet"
        said.append(f"Interrupted: {so_far}. The same command again continues.")
    if not outcome.binding:
        said.append("Saving everything fits this budget: nothing has to be given up, and the plan is to save all.")
    if outcome.dry_run:
        said.append("Dry run: nothing was measured, all numbers are simulated.")
    elif outcome.source == "simulated":
        said.append(f"Nothing was measured: all numbers are simulated for {outcome.device.name}.")
    if not outcome.dry_run:
        said.append(_effort(outcome))
    said += [f"{r.name}: {r.note}" for r in rows if len(r.note) > SHORT]
    if outcome.set_aside:
        said.append(f"What stood there before is kept as {outcome.set_aside}.")
    return [*said, *outcome.notes]


def _effort(outcome: SearchOutcome) -> str:
    total = sum(s.seconds for s in outcome.stages if not s.part)
    said = [(s.part, f"{s.name} {words.seconds(s.seconds)}") for s in outcome.stages if s.seconds >= 0.1]
    stages, within = (", ".join(text for part, text in said if part is wanted) for wanted in (False, True))
    parts = f"{stages}; of these {within}" if within else stages
    text = f"{words.counted(outcome.measured_trials, 'trial')} {outcome.source}"
    text += f", {outcome.resumed} of them in earlier runs," if outcome.resumed else ""
    text += f" in {words.seconds(total)}" + (f" ({parts})" if parts else "") if outcome.stages else ""
    return f"{text}. {outcome.stopped[:1].upper()}{outcome.stopped[1:]}".rstrip(". ") + "."


def _print_plan(outcome: SearchOutcome, plan: Plan, console: Console) -> None:
    choices = plan.expand_planned()
    where = plan.environment.device.name if plan.environment is not None and plan.status == "simulated" else ""
    status = plan.status + (f" for {where}" if where else "")
    console.print()
    console.print(Text.assemble(("Plan  ", "bold"), f"{words.strip(choices)}   {words.tally(choices)}, {status}"))
    for line in choice_lines(plan.choices):
        said = fill(
            line,
            console.width,
            initial_indent="  ",
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        console.print(Text(said), style="dim", soft_wrap=True)
    print_legend(choices.values(), console)
    for line in set_lines(plan):
        console.print(Padding.indent(Text(line), 2))
    if outcome.plan_path is None:
        return
    path = str(outcome.plan_path)
    console.print()
    console.print(Text.assemble("Written to ", (path, "bold")), soft_wrap=True)
    for line in _on_the_device(plan, path):
        console.print(Text(line), soft_wrap=True)
    console.print("To train with it:")
    console.print()
    for line in loading_lines(path, plan.compile):
        console.print(Text(f"    {line}", style="cyan"), soft_wrap=True)


def _on_the_device(plan: Plan, path: str) -> tuple[str, ...]:
    """Commands that compare a simulated plan with real steps, where one process can take such steps."""
    if plan.status != "simulated":
        return ()
    if plan.workload is not None and (only := plan.workload.simulated_only()):
        return (f"No command here takes real steps with {', '.join(only)}: its numbers stay simulated.",)
    path = shlex.quote(path)
    compare, go_on = f"    autockpt verify {path}", f"    autockpt search --resume {path}"
    return ("On the device, compare it with real steps, or continue with measured ones:", compare, go_on)


def print_batches(answer: BatchAnswer, console: Console) -> None:
    """Print the best setting's whole answer, all settings by tokens per second, and the trainers' flags."""
    print_answer(answer.outcome, console)
    best = answer.best
    table = plain_table(">batch", ">×", "<plan", ">peak", ">update", f">{answer.unit}/s", ">of best")
    table.add_row(*best.cells(best), style="bold")
    for setting in answer.others:
        table.add_row(*setting.cells(best))
    heading(f"{answer.rows_per_update} rows per update: which micro-batch", console, table)
    if not isinstance(best.score, Measurement):
        console.print(simulated(answer.outcome.step_note))
    counted = f"The trials above are those of micro-batches of {best.batch_size}; "
    counted += f"{answer.trials} of all sizes, in {words.seconds(answer.seconds)}."
    remarks([counted, *answer.notes], console)
    heading("The settings that go with the plan:", console)
    for trainer, flags in _trainer_flags(best.batch_size, best.accumulate).items():
        console.print(Text(f"  {trainer:<14}{flags}", style="cyan"), soft_wrap=True)


def _trainer_flags(batch_size: int, accumulate: int) -> dict[str, str]:
    """What trainers are given, on one device: micro-batch and accumulation by their own names."""
    rows = batch_size * accumulate
    return {
        "transformers": f"--per_device_train_batch_size {batch_size} --gradient_accumulation_steps {accumulate}",
        "axolotl": f"--micro-batch-size {batch_size} --gradient-accumulation-steps {accumulate}",
        "torchtitan": f"--training.local_batch_size {batch_size} --training.global_batch_size {rows}",
    }
