"""``autockpt search``: find a plan by measured steps."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import INTERRUPTED, guarded
from autockpt.cli.options import (
    DEVICE,
    FRESH,
    LENGTH_OR_AUTO,
    RUNS_FOLDER,
    duration,
    flag,
    listed,
    one_of,
    opt,
    takes_workload,
    workload_spec,
)
from autockpt.errors import UsageError, without_passwords

if TYPE_CHECKING:
    from autockpt.schema import Listener, SearchRequest, WorkloadSpec

AUTO = "auto"
# what is planned for where no model is named, by kind of device
DEFAULT_MODELS = {"cuda": "llama-1b"}
SMALL_MODEL = "llama-small"
# what is simulated where there is no accelerator, and neither a model nor a device was named
DEFAULT_HARDWARE, SIMULATED_MODEL = "rtx4090", "llama-1b"


@guarded
@partial(takes_workload, seq_len=LENGTH_OR_AUTO)
def search(
    workload: dict[str, Any],
    *,
    budget: str | None = opt(
        "--budget SIZE",
        "24GB, 24GiB, 60% (of this job's own peak), 60%act (of the activation range), auto (all there is). "
        "Required without --hardware and --resume, else by default auto.",
    ),
    headroom: str | None = opt(
        "--headroom SIZE",
        "Leave this much of the budget free: 2% (of it), 500MB. Default: 5% of a budget in bytes, or of auto, with "
        "--hardware, whose peaks no card has confirmed; else 0%.",
    ),
    host_budget: str | None = opt(
        "--host-budget SIZE",
        "8GB, 8GiB: most that offloading may claim of the host's memory (on a CPU: of its file). Default: no bound.",
    ),
    global_batch: int | None = opt(
        "--global-batch N",
        "Sequences per optimizer update: micro-batch, accumulation and plan with the most tokens per second. "
        "Replaces --batch-size.",
        min=1,
    ),
    lengths: str | None = opt(
        "--lengths FILE|HISTOGRAM",
        "Sequences of all lengths: a file with a length (and a count) on each line, or 512:100,1024:40,4096:3. One "
        "plan with sets of choices by the size of the batch, each padded to its own longest sequence.",
    ),
    device: str | None = DEVICE,
    hardware: str | None = opt(
        "--hardware NAME",
        "Simulate this device, local or not, and measure nothing: rtx4090, h100, …, or a YAML file.",
    ),
    gpus_per_host: int = opt(
        "--gpus-per-host N",
        "With --hardware: so many GPUs of a host train at the same time and share its link.",
        default=1,
        min=1,
    ),
    trials: int = opt(
        "--trials -n N",
        "Measure (or simulate) at most this many candidates, besides well-known and simple plans; with --lengths or "
        "--global-batch at least three for each size.",
        default=40,
        min=1,
    ),
    timeout: str | None = opt(
        "--timeout TIME",
        "Stop after this long: 90s, 10m, 1h. Stages that would exceed it are shortened, and a note says which. Begins "
        "once --seq-len auto has found its length.",
    ),
    seed: int | None = opt("--seed N", "For weights, batch and sampler. Default: the job's, else 0.", min=0),
    space: str = opt(
        "--space NAME",
        "What a sampler moves: knobs (a few numbers that steer the solver), or your own YAML file.",
        default="knobs",
    ),
    choices: str | None = opt("--choices A,B", "Allow only these, as in save,recompute."),
    storage: str | None = opt(
        "--storage URL",
        "Optuna storage. Default: sqlite in the run. Give a URL with a password by AUTOCKPT_STORAGE, or keep the "
        "password in ~/.pgpass: other users can read command lines.",
        envvar="AUTOCKPT_STORAGE",
    ),
    out: Path = RUNS_FOLDER,
    plan_out: Path | None = opt("--plan-out FILE", "Write the plan here, too; another one there is set aside."),
    compile: str | None = opt(
        "--compile [layers|model]",
        "Plan for compiled training: measure steps with every layer, or the whole model, compiled.",
    ),
    allow_inexact: bool = flag("--allow-inexact", "Also run head and loss in chunks: gradients equal up to rounding."),
    dry_run: bool = flag("--dry-run", "Trace, solve and predict; measure nothing."),
    fresh: bool = FRESH,
    no_wait: bool = flag("--no-wait", "End with exit code 4 where another search is measuring on the device."),
    again: bool = flag("--again", "Search again where an answer is on record. Default: print that answer."),
    resume: Path | None = opt(
        "--resume RUN|PLAN",
        "Start from this plan or run, which may be simulated: options that are not given are taken from it, its "
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
    from autockpt.cli.answer_table import print_answer, print_batches
    from autockpt.schema import SearchOutcome
    from autockpt.schema.runs import plan_at
    from autockpt.shipped import load_space
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
    simulate = hardware or (None if "model" in workload or base or device else _stand_in())
    open_length = workload.get("seq_len") == AUTO
    asked_for = {name: value for name, value in workload.items() if not (open_length and name == "seq_len")}
    spec, notes = _workload(asked_for, device, simulate, base)
    if simulate is not None and hardware is None:
        notes = (_INSTEAD,)
    command = ("autockpt", *sys.argv[1:])
    if any(without_passwords(word) != word for word in command):
        notes = (*notes, _NO_PASSWORD)
    allowed = load_space(space)
    request = search_request(
        budget="auto" if budget is None else budget,
        headroom=headroom,
        workload=spec,
        space=allowed if choices is None else allowed.restricted(listed(choices)),
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
        compile=one_of("--compile", compile, ("layers", "model")),
        allow_inexact=allow_inexact,
        dry_run=dry_run,
        fresh=fresh,
        again=again,
        wait=not no_wait,
        command=command,
        notes=notes,
    )
    with _watched(request) as watcher:
        if simulate is None and device is None and _stand_in():
            watcher.note(_ON_THE_CPU)
        found = answer(request, watcher)
    if isinstance(found, SearchOutcome):
        outcome = found
        screen.show(found, print_answer, as_json)
    else:
        outcome = found.outcome
        screen.show(found, print_batches, as_json)
    if (run := outcome.run_directory) is not None and run.is_dir():
        from autockpt.analysis.page import page_of

        screen.progress().print(page_of(run), soft_wrap=True)
    if outcome.interrupted:
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


def _stand_in() -> str | None:
    """The hardware to simulate where there is no accelerator."""
    from autockpt.devices import get_device

    return DEFAULT_HARDWARE if get_device(None).kind == "cpu" else None


def _workload(
    given: dict[str, Any], device: str | None, simulated: str | None, base: WorkloadSpec | None
) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """The workload, over that of the plan to start from, and what was decided because no model was named."""
    if "model" in given or base is not None:
        return workload_spec(given, base=base), ()
    name, on = SIMULATED_MODEL, ""
    if simulated is None:
        from autockpt.devices import get_device

        kind = get_device(device).kind
        name, on = DEFAULT_MODELS.get(kind, SMALL_MODEL), f" on {kind}"
    note = f"No model was named, so this plans for the built-in {name}{on}; --model names yours."
    return workload_spec(given, default=name), (note,)


@contextmanager
def _watched(request: SearchRequest) -> Iterator[Listener]:
    """Progress on the screen, with what the request has to note."""
    from autockpt.progress import listener

    with listener(screen.progress()) as watcher:
        for note in request.notes:
            watcher.note(note)
        yield watcher
