"""Measure autockpt's plans against every other way of saving memory: same machine, batch and meter, interleaved.

python -m tests.evidence.bench --model llama-small --device cpu --budgets 45%,60%
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from autockpt.callstack import with_room
from autockpt.cli import screen
from autockpt.cli.app import PanelCommand
from autockpt.cli.guard import INTERRUPTED, guarded
from autockpt.cli.options import (
    DEVICE,
    FRESH,
    RUNS_FOLDER,
    duration,
    flag,
    listed,
    opt,
    takes_workload,
    workload_spec,
)
from autockpt.errors import UsageError

if TYPE_CHECKING:
    from autockpt.schema import Budget, SearchSpace


@guarded
@takes_workload
def bench(
    workload: dict[str, Any],
    *,
    budgets: str = opt(
        "--budgets A,B",
        "Shares of save-everything's measured peak, or sizes, as in 45%,24GB.",
        default="30%,45%,60%,85%",
    ),
    peers: str | None = opt("--peers A,B", "Only these, as in 'first-k,autockpt'. Default: all there are."),
    rounds: int = opt("--rounds N", "Time every method this often, interleaved.", default=9, min=1),
    most_rounds: int = opt("--most-rounds N", "Time what decides who is ahead at most this often.", default=60, min=1),
    timeout: str | None = opt("--timeout TIME", "Begin no round after so long: 90s, 10m, 1h."),
    trials: int = opt("--trials -n N", "Plans measured by each search, at most.", default=20, min=1),
    choices: str | None = opt("--choices A,B", "What autockpt's plans may use. Default: all; on a CPU no offload."),
    device: str | None = DEVICE,
    seed: int = opt("--seed N", "For weights, batch and sampler.", default=0, min=0),
    out: Path = RUNS_FOLDER,
    fresh: bool = FRESH,
    as_json: bool = flag("--json", "Print the report as JSON."),
) -> None:
    """Measure autockpt's plans against other ways of saving memory.

    Same machine, batch and meter, interleaved steps: rules per layer, op-level sets, PyTorch's SAC ILP (needs pulp and
    pwlf), torch.compile's memory budget, a searched plan per budget. Gradients are compared with plain
    training's first. A method that cannot run is a row that says so. Writes a table and JSON.
    """
    from autockpt.progress import listener
    from tests.evidence.bench import run_bench
    from tests.evidence.bench.report import BenchRequest
    from tests.evidence.bench.view import bench_page

    limit = duration(timeout)
    space, notes = _space(choices, device)
    request = BenchRequest(
        workload=workload_spec(workload | {"seed": seed}),
        budgets=_budgets(budgets),
        space=space,
        peers=None if peers is None else listed(peers),
        device=device,
        rounds=rounds,
        most_rounds=max(rounds, most_rounds),
        timeout=limit,
        trials=trials,
        seed=seed,
        out=out,
        fresh=fresh,
        command=("python", "-m", "tests.evidence.bench", *sys.argv[1:]),
        notes=notes,
    )
    with listener(screen.progress()) as watcher:
        report = run_bench(request, watcher)
    print(report.model_dump_json(indent=2) if as_json else bench_page(report), flush=True)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)


def _budgets(text: str) -> tuple[Budget, ...]:
    from autockpt.schema import parse_budget

    found = tuple(map(parse_budget, listed(text)))
    if len({budget.text for budget in found}) < len(found):
        raise UsageError(f"--budgets {text} names a budget twice", remedy="Name each once.")
    return found


def _space(choices: str | None, device: str | None) -> tuple[SearchSpace, tuple[str, ...]]:
    """What our searches may use. On a CPU offload would win by not being counted, so it has to be asked for."""
    from autockpt.devices import get_device
    from autockpt.shipped import load_space

    space = load_space("knobs")
    if choices is not None:
        return space.restricted(listed(choices)), ()
    if get_device(device).kind != "cpu":
        return space, ()
    note = (
        "plans are searched without offload here: on a CPU it goes to memory-mapped files, which a peak does not count "
        "(--choices allows it)"
    )
    return space.without([kind for kind in space.choices if "offload" in kind]), (note,)


def build() -> typer.Typer:
    """The program as a typer application."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=PanelCommand)(bench)
    return app


if __name__ == "__main__":
    with_room(build())
