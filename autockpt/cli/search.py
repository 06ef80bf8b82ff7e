"""``autockpt search``: find a plan by measured steps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autockpt.cli import screen
from autockpt.cli.guard import INTERRUPTED, guarded
from autockpt.cli.options import duration, takes_workload, workload_spec
from autockpt.errors import UsageError

if TYPE_CHECKING:
    from autockpt.schema import SearchOutcome, SearchRequest, SearchSpace, WorkloadSpec

# what is planned for where no model is named, by kind of device
DEFAULT_MODELS = {"cuda": "llama-1b"}
SMALL_MODEL = "llama-small"


@guarded
@takes_workload
def search(
    workload: dict[str, Any],
    *,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="SIZE",
            help="24GB, 24GiB, 60% (of this job's own peak), 60%act (of the activation range), auto (all there is). "
            "Required.",
        ),
    ] = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            "--host-budget",
            metavar="SIZE",
            help="8GB, 8GiB: most that offloading may claim of the host's memory (on a CPU: of its file). Default: no "
            "bound.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1. Default: the best there is.")
    ] = None,
    trials: Annotated[
        int, typer.Option("--trials", "-n", min=1, metavar="N", help="Measure at most this many plans.")
    ] = 40,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Stop after this long: 90s, 10m, 1h.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, metavar="N", help="For weights, batch and sampler.")] = 0,
    space: Annotated[
        str, typer.Option("--space", metavar="NAME", help="knobs, layers, or the path of your own YAML file.")
    ] = "knobs",
    choices: Annotated[
        str | None, typer.Option("--choices", metavar="A,B", help="Allow only these, as in save,recompute.")
    ] = None,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="URL", help="Optuna storage. Default: sqlite in the run.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="DIR", help="Folder that gets the run's directory.")
    ] = Path("results"),
    plan_out: Annotated[
        Path | None,
        typer.Option("--plan-out", metavar="FILE", help="Write the plan here, too; another one there is set aside."),
    ] = None,
    allow_inexact: Annotated[
        bool,
        typer.Option("--allow-inexact", help="Also run head and loss in chunks: gradients equal up to rounding."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Trace, solve and predict; measure nothing.")] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Set an earlier run of this question aside, or continue it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Find a plan that fits a memory budget.

    Plans are proposed by an exact solver, ghost-run, and measured by real training steps in a worker process.
    Without --model a built-in shape is planned for: llama-1b on a GPU, a small one on a CPU.
    """
    from autockpt.schema import SearchRequest, parse_budget, parse_size

    if budget is None:
        raise UsageError("no budget was given", remedy="Add --budget with 24GB, 24GiB, 60%, 60%act or auto.")
    asked = parse_budget(budget)
    limit = duration(timeout)
    allowed = _space(space, choices)
    spec, notes = _workload(workload, device, seed)
    request = SearchRequest(
        budget=asked,
        workload=spec,
        space=allowed,
        host_budget=None if host_budget is None else parse_size(host_budget),
        device=device,
        trials=trials,
        timeout=limit,
        seed=seed,
        storage=storage,
        out=out,
        plan_out=plan_out,
        allow_inexact=allow_inexact,
        dry_run=dry_run,
        fresh=fresh,
        command=("autockpt", *sys.argv[1:]),
        notes=notes,
    )
    outcome = _run(request)
    _print(outcome, as_json)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _space(name: str, choices: str | None) -> SearchSpace:
    from autockpt.schema import load_space

    space = load_space(name)
    return space if choices is None else space.restricted(tuple(c.strip() for c in choices.split(",") if c.strip()))


def _workload(given: dict[str, Any], device: str | None, seed: int) -> tuple[WorkloadSpec, tuple[str, ...]]:
    """The workload, and what was decided because no model was named."""
    if "model" in given:
        return workload_spec(given, seed=seed), ()
    from autockpt.devices import get_device

    kind = get_device(device).kind
    name = DEFAULT_MODELS.get(kind, SMALL_MODEL)
    note = f"No model was named, so this plans for the built-in {name} on {kind}; --model names yours."
    return workload_spec(given, seed=seed, default=name), (note,)


def _run(request: SearchRequest) -> SearchOutcome:
    from autockpt.report import listener
    from autockpt.tuning import run_search

    with listener(screen.progress()) as watcher:
        for note in request.notes:
            watcher.note(note)
        return run_search(request, watcher)


def _print(outcome: SearchOutcome, as_json: bool) -> None:
    from autockpt.report import print_answer

    if as_json:
        screen.print_json(outcome.model_dump_json(indent=2))
    else:
        print_answer(outcome, screen.results())
