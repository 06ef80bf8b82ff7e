"""``autockpt search``: parse the options into a request, and print the answer."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autockpt.analysis.sentences import AnswerRow, answer_rows, loading_lines
from autockpt.cli.guard import INTERRUPTED, guarded, progress, show
from autockpt.cli.options import DEVICE, FRESH, RUNS_FOLDER, duration, flag, listed, opt, takes_workload
from autockpt.errors import UsageError, without_passwords
from autockpt.progress import listener
from autockpt.schema import CompileMode, Measurement, Plan, SearchOutcome, format_binary, format_bytes, words
from autockpt.schema.baselines import legend_of_names
from autockpt.schema.plan import choice_lines, set_lines
from autockpt.schema.request import TRIALS, BatchAnswer, PipelineAnswer
from autockpt.schema.run_directory import plan_at
from autockpt.schema.workload import Stage, described_by
from autockpt.terminal import VERDICTS, heading, plain_table, print_legend, remarks, simulated

AUTO = "auto"
# the model that is planned for where none is named, by kind of device
DEFAULT_MODELS = {"cuda": "llama-1b"}
SMALL_MODEL = "llama-small"
# what is simulated where there is no accelerator, and neither a model nor a device was named
DEFAULT_HARDWARE, SIMULATED_MODEL = "rtx4090", "llama-1b"


@guarded
@takes_workload
def search(
    workload: dict[str, Any],
    *,
    budget: str | None = opt(
        "--budget SIZE",
        "24GB, 24GiB, 60% (of this job's own peak), 60%act (60 % of the way from the leanest plan to that peak), auto "
        "(all there is). Required, except with --resume (default: the plan's budget) and --hardware (default: auto).",
    ),
    headroom: str | None = opt(
        "--headroom SIZE",
        "Leave this much of the budget free: 2% (of it), 500MB. Default: 5% with --hardware and a budget in bytes or "
        "auto (simulated peaks), else 0%.",
    ),
    host_budget: str | None = opt(
        "--host-budget SIZE",
        "The most host memory that offloading may claim (on a CPU: of its file): 8GB, 8GiB. Default: no bound.",
    ),
    global_batch: int | None = opt(
        "--global-batch N",
        "Sequences per optimizer update. Finds the micro-batch, accumulation and plan with the most tokens per second. "
        "Replaces --batch-size.",
        min=1,
    ),
    lengths: str | None = opt(
        "--lengths FILE|HISTOGRAM",
        "Find one plan with sets of choices for batches of different lengths, each padded to its longest sequence. A "
        "file with a length (and a count) on each line, or 512:100,1024:40,4096:3.",
    ),
    device: str | None = DEVICE,
    hardware: str | None = opt(
        "--hardware NAME",
        "Simulate this device, local or not, and measure nothing: rtx4090, h100, …, or a YAML file.",
    ),
    gpus_per_host: int = opt(
        "--gpus-per-host N",
        "With --hardware: how many GPUs of a host train at the same time and share its link.",
        default=1,
        min=1,
    ),
    trials: int = opt(
        "--trials -n N",
        "Measure at most this many candidates, besides baselines and simple plans; with --lengths or --global-batch "
        "at least three for each size. A simulation tries one.",
        default=TRIALS,
        min=1,
    ),
    timeout: str | None = opt(
        "--timeout TIME",
        "Stop after this long: 90s, 10m, 1h. Stages that would exceed it are shortened, and a note says which. Begins "
        "once --seq-len auto has found its length.",
    ),
    seed: int | None = opt("--seed N", "Seed of weights, batch and sampler. Default: the job's, else 0.", min=0),
    choices: str | None = opt("--choices A,B", "Try only these choices: save,recompute. Under FSDP2 gathered is one."),
    storage: str | None = opt(
        "--storage URL",
        "Optuna storage. Default: an SQLite file in a measured run's directory. Give a URL with a password by "
        "AUTOCKPT_STORAGE, or keep the password in ~/.pgpass: other users can read command lines.",
        envvar="AUTOCKPT_STORAGE",
    ),
    out: Path = RUNS_FOLDER,
    plan_out: Path | None = opt("--plan-out FILE", "Also write the plan here; an earlier file is renamed."),
    compile: CompileMode | None = opt(
        "--compile [layers|model]",
        "Plan for compiled training: measure steps with every layer, or the whole model, compiled.",
    ),
    allow_inexact: bool = flag(
        "--allow-inexact", "Also try chunked loss and tiled MLPs (gradients equal up to rounding)."
    ),
    fresh: bool = FRESH,
    no_wait: bool = flag("--no-wait", "Exit with code 4 if another search is measuring on the device."),
    resume: Path | None = opt(
        "--resume RUN|PLAN",
        "Start from this plan or run, which may be simulated. Options that are not given are taken from it, its "
        "plan is tried early, and costs are measured again.",
    ),
    as_json: bool = flag("--json", "Print the answer as JSON."),
) -> None:
    """Find a plan that fits a memory budget.

    An exact solver proposes plans. Each is ghost-run (a whole step on tensors without memory), then measured by real
    training steps in a worker process; with --hardware it is simulated instead. Without --model a built-in shape is
    planned for: llama-1b on a GPU; without a GPU llama-1b on a simulated rtx4090; with --device cpu a small one,
    measured.
    """
    from autockpt.devices import get_device
    from autockpt.tuning import answer, search_request

    start = None if resume is None else plan_at(resume)
    if budget is None and start is not None and start.budget is not None:
        budget = start.budget.asked
        if (hardware is not None) == (start.source == "simulated"):  # real steps need no simulation's margin
            headroom = headroom or start.budget.headroom or "0%"
    if budget is None and hardware is None:
        raise UsageError("no budget was given", remedy="Add --budget with 24GB, 24GiB, 60%, 60%act or auto.")
    base = start.workload if start is not None else None
    if seed is not None:
        workload["seed"] = seed
    if open_length := workload.get("seq_len") == AUTO:
        del workload["seq_len"]
    kind, named = None if hardware else get_device(device).kind, "model" in workload or base is not None
    simulate = DEFAULT_HARDWARE if kind == "cpu" and not (named or device) else hardware
    model, notes = SIMULATED_MODEL if simulate else DEFAULT_MODELS.get(kind or "", SMALL_MODEL), tuple[str, ...]()
    if simulate is not None and hardware is None:
        notes = (_INSTEAD,)
    elif not named:
        on = f" on {kind}" if kind else ""
        notes = (f"No model was named, so this plans for the built-in {model}{on}; --model names yours.",)
    spec = described_by(workload if named else {"model": model, **workload}, base)
    command = ("autockpt", *sys.argv[1:])
    if any(without_passwords(word) != word for word in command):
        notes = (*notes, _NO_PASSWORD)
    request = search_request(
        budget="auto" if budget is None else budget,
        headroom=headroom,
        workload=spec,
        choices=None if choices is None else listed(choices),
        host_budget=host_budget,
        device=device,
        hardware=simulate,
        gpus_per_host=gpus_per_host,
        global_batch=global_batch,
        lengths=lengths,
        longest=open_length,
        start=start,
        trials=trials,
        timeout=duration(timeout),
        seed=spec.seed,
        storage=storage,
        out=out,
        plan_out=plan_out,
        compile=compile,
        allow_inexact=allow_inexact,
        fresh=fresh,
        wait=not no_wait,
        command=command,
        notes=notes,
    )
    with listener(progress()) as watcher:
        for note in request.notes:
            watcher.note(note)
        if kind == "cpu" and simulate is None and device is None:
            watcher.note(_ON_THE_CPU)
        found = answer(request, watcher)
    if isinstance(found, SearchOutcome):
        outcomes = [found]
        show(found, print_answer, as_json)
    elif isinstance(found, BatchAnswer):
        outcomes = [found.outcome]
        show(found, print_batches, as_json)
    else:
        outcomes = [stage.outcome for stage in found.stages]
        show(found, print_stages, as_json)
    for outcome in outcomes:
        if (run := outcome.run_directory) is not None and run.is_dir():
            from autockpt.analysis.page import page_of

            progress().print(page_of(run), soft_wrap=True)
    if any(outcome.interrupted for outcome in outcomes):
        raise typer.Exit(INTERRUPTED)


_INSTEAD = (
    f"There is no GPU here and no model was named, so this simulates {SIMULATED_MODEL} on a 24 GB card "
    f"({DEFAULT_HARDWARE}); nothing is measured. To measure on this machine: --device cpu, or --model with yours; "
    "--hardware simulates another card."
)

_ON_THE_CPU = (
    "There is no GPU here: this plans for this machine's CPU and memory, by steps on it. "
    "--hardware plans for a described card."
)


_NO_PASSWORD = (
    "The command is recorded without its password. To repeat it, set AUTOCKPT_STORAGE to the whole URL and leave "
    "--storage out; or keep the password of a PostgreSQL server in ~/.pgpass."
)


def print_answer(outcome: SearchOutcome, console: Console) -> None:
    """Print the answer: job, budget, table, notes, the plan and the lines that load it."""
    console.print(_heading(outcome))
    rows = answer_rows(outcome.rows, outcome.budget.bytes)
    if rows:
        console.print()
        console.print(answer_table(rows))
        if any(r.plan.predicted is not None for r in rows) or outcome.step_note:
            console.print(simulated(outcome.step_note))
        legend = legend_of_names(row.plan.name for row in rows)
        unknown = any(row.known is not None and row.known.noise >= words.USELESS_NOISE for row in rows)
        console.print(Text("; ".join([*legend, *([words.NOISE_UNKNOWN] if unknown else [])])), style="dim")
    remarks(_remarks(outcome, rows), console)
    if outcome.plan is not None:
        _print_plan(outcome, outcome.plan, console)


def answer_table(rows: list[AnswerRow]) -> Table:
    """The table of plans, with predictions below measurements."""
    host = any(row.known is not None and row.known.host_bytes for row in rows)  # where something is offloaded
    columns = ["<plan", "fits", ">peak", ">spare", ">step", ">overhead", *([">host"] if host else [])]
    table = plain_table(*columns)
    for row in rows:
        table.add_row(*_cells(row)[: len(columns)], style="bold" if row.ours else None)
    return table


def _cells(row: AnswerRow) -> list[Text | str]:
    word, colour = VERDICTS.get(row.verdict, (row.verdict, ""))
    plan, known = row.plan, row.known
    peak, step, overhead = Text("—"), Text(words.step_of(known)), Text("—")
    if plan.measured is not None:
        peak = Text(format_binary(plan.measured.peak_bytes))
        if plan.predicted is not None:
            peak.append(f"\n~{format_binary(plan.predicted.peak_bytes)}", style="dim not bold")
            if plan.predicted.step_seconds is not None:
                step.append(f"\n~{words.seconds(plan.predicted.step_seconds)}", style="dim not bold")
    elif known is not None:
        peak = Text(f"~{format_binary(known.peak_bytes)}")
    if row.overhead is not None:
        overhead = Text(f"{'~' if row.overhead_predicted else ''}{words.share(row.overhead, signed=True)}")
        if 0 < row.overhead_noise < words.USELESS_NOISE:
            overhead.append(f"\n±{words.share(row.overhead_noise)}")
    spare = "—" if row.spare_bytes is None else format_binary(row.spare_bytes)
    host = format_binary(known.host_bytes) if known is not None and known.host_bytes else "—"
    return [plan.name, Text(word, style=colour), peak, spare, step, overhead, host]


def _heading(outcome: SearchOutcome) -> Text:
    text = Text()
    model = outcome.plan.model.name if outcome.plan else outcome.settings.get("model")
    text.append(f"{model} " if model else "", style="bold")
    text.append(f"on {outcome.device.name}")
    if outcome.source == "simulated":
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
    """Notes on the answer that are not in the table."""
    lines = []
    if outcome.interrupted:
        so_far = "this is the best so far" if outcome.plan else "nothing that fits was measured yet"
        lines.append(f"Interrupted: {so_far}. Run the same command again to continue.")
    if not outcome.binding:
        lines.append("Saving everything fits this budget: nothing has to be given up, and the plan is to save all.")
    if outcome.source == "simulated":
        lines.append(f"Nothing was measured: all numbers are simulated for {outcome.device.name}.")
    lines.append(_effort(outcome))
    lines += [f"{row.plan.name}: {row.note}" for row in rows if row.note]
    if outcome.set_aside:
        lines.append(f"The earlier file is kept as {outcome.set_aside}.")
    return [*lines, *outcome.notes]


def _effort(outcome: SearchOutcome) -> str:
    text = f"{words.counted(outcome.measured_trials, 'trial')} {outcome.source}"
    text += f", {outcome.resumed} of them in earlier runs," if outcome.resumed else ""
    text += f" in {words.seconds(outcome.seconds)}"
    return f"{text}. {outcome.stopped[:1].upper()}{outcome.stopped[1:]}".rstrip(". ") + "."


def _print_plan(outcome: SearchOutcome, plan: Plan, console: Console) -> None:
    choices = plan.expand_planned()
    where = plan.environment.device.name if plan.environment is not None and plan.status == "simulated" else ""
    status = plan.status + (f" for {where}" if where else "")
    console.print()
    console.print(Text.assemble(("Plan  ", "bold"), f"{words.strip_and_tally(choices)}, {status}"))
    for line in choice_lines(plan.choices):
        console.print(Padding.indent(Text(line, style="dim"), 2))
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
    """Commands that compare a simulated plan with real steps, if one process can take them."""
    if plan.status != "simulated":
        return ()
    path, spec = shlex.quote(path), plan.workload
    if spec is not None and (by_ranks := {*spec.simulated_settings()}) and by_ranks <= {"shard", "ddp"}:
        ranks = spec.ranks if spec.shard is not None else "N"
        again = f"    torchrun --nproc-per-node {ranks} -m autockpt search --resume {path}"
        return ("On the devices, continue with measured steps:", again)
    if spec is not None and (only := spec.simulated_only()):
        return (f"No command here takes real steps with {', '.join(only)}: its numbers stay simulated.",)
    compare, go_on = f"    autockpt verify {path}", f"    autockpt search --resume {path}"
    return ("On the device, compare it with real steps, or continue with measured ones:", compare, go_on)


def print_batches(answer: BatchAnswer, console: Console) -> None:
    """Print the best setting's whole answer, all settings by tokens per second, and the trainers' flags."""
    print_answer(answer.outcome, console)
    best = answer.best
    heading(f"{answer.rows_per_update} rows per update: which micro-batch", console, batches_table(answer))
    if not isinstance(best.score, Measurement):
        console.print(simulated(answer.outcome.step_note))
    counted = f"The trials above are those of micro-batches of {best.batch_size}; "
    counted += f"{answer.trials} of all sizes, in {words.seconds(answer.seconds)}."
    remarks([counted, *answer.notes], console)
    heading("The settings that go with the plan:", console)
    for trainer, flags in _trainer_flags(best.batch_size, best.accumulate).items():
        console.print(Text(f"  {trainer:<14}{flags}", style="cyan"), soft_wrap=True)


def batches_table(answer: BatchAnswer) -> Table:
    """The micro-batches that were tried, the best first."""
    table = plain_table(">batch", ">×", "<plan", ">peak", ">update", f">{answer.unit}/s", ">of best")
    for setting in (answer.best, *answer.others):
        mark = "" if isinstance(setting.score, Measurement) else "~"
        table.add_row(
            str(setting.batch_size),
            str(setting.accumulate),
            setting.plan,
            f"{mark}{format_binary(setting.score.peak_bytes)}",
            words.step_of(setting.score),
            f"{mark}{setting.per_second:,.0f}",
            f"{setting.per_second / answer.best.per_second * 100:.0f} %",
            style="bold" if setting is answer.best else None,
        )
    return table


def print_stages(answer: PipelineAnswer, console: Console) -> None:
    """Print one line for each stage, which is the slowest, the cut that balances better, and where the plans are."""
    first, slowest = answer.stages[0].outcome, answer.slowest
    of = f" on {first.device.name}{' (simulated)' if first.source == 'simulated' else ''}"
    console.print(Text.assemble((slowest.plan.model.name, "bold"), of, f"\nBudget {first.budget.words}\n"))
    table = plain_table("<stage", ">layers", ">peak", ">step", "<plan")
    for stage in answer.stages:
        mark = "" if isinstance(stage.score, Measurement) else "~"
        choices = stage.plan.expand_planned()
        table.add_row(
            stage.stage,
            str(stage.layers),
            f"{mark}{format_binary(stage.score.peak_bytes)}",
            words.step_of(stage.score),
            words.strip_and_tally(choices),
            style="bold" if stage is slowest else None,
        )
    console.print(table)
    if first.source == "simulated":
        console.print(simulated(first.step_note))
    notes = [f"Stage {slowest.stage} is the slowest: others have the leanest plans on record that are no slower."]
    if answer.cut_seconds is not None:
        gain = answer.cut_seconds / (slowest.score.step_seconds or 1.0) - 1
        cut = f"{','.join(map(str, answer.faster_cut))} {Stage.parse(slowest.stage).schedule}".strip()
        notes.append(
            f"With `stage: {cut}` the slowest stage would take about {words.seconds(answer.cut_seconds)} "
            f"({words.share(gain, signed=True)}): search again with it."
        )
    common = [note for note in first.notes if all(note in stage.outcome.notes for stage in answer.stages)]
    remarks([*notes, *common], console)
    paths = [str(stage.path) for stage in answer.stages if stage.path is not None]
    if paths:
        heading("To train with them, on the rank of each stage:", console)
    for path in paths:
        console.print(Text(f"    {loading_lines(path)[1]}", style="cyan"), soft_wrap=True)


def _trainer_flags(batch_size: int, accumulate: int) -> dict[str, str]:
    """The settings of trainers for micro-batch and accumulation on one device."""
    rows = batch_size * accumulate
    return {
        "transformers": f"--per_device_train_batch_size {batch_size} --gradient_accumulation_steps {accumulate}",
        "axolotl": f"--micro-batch-size {batch_size} --gradient-accumulation-steps {accumulate}",
        "torchtitan": f"--training.local_batch_size {batch_size} --training.global_batch_size {rows}",
    }
