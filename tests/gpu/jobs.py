"""Parts 5 and 6: a search as a user would call it, then its plan beside everybody else's under the same real limit."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import yaml
from torch import nn

from autockpt.errors import AutockptError, DeviceOutOfMemory, InfeasibleError
from autockpt.measuring import StepRunner
from autockpt.measuring.failures import device_lost
from autockpt.measuring.statistics import noise, ratio_interval
from autockpt.runtime import attach
from autockpt.schema import SAVE, WorkloadSpec, parse_choice
from autockpt.schema.choices import dump_choice
from autockpt.schema.plan import Plan
from autockpt.workload import discover_head, discover_units
from tests.evidence.bench.peers import PEERS, PLAIN
from tests.evidence.bench.peers import Context as BenchContext
from tests.evidence.bench.peers.losses import LOSSES
from tests.evidence.bench.worker import PeerRunner
from tests.gpu.items import Context
from tests.gpu.measuring import plans, running
from tests.gpu.shapes import Task

OURS = "ours"
RIVALS = (
    *(PLAIN, "recompute all", "every-n", "keep ops", "torch_remat", "offload all", "inputs offloaded"),
    "TRL's offload",
)
ANY_LOSS = (PLAIN, "every-n 2", "recompute all", "keep ops attention", "inputs offloaded")  # with other losses as well
Attach = Callable[[nn.Module], Callable[[], None]]


def job(context: Context) -> dict[str, Any]:
    """All budgets of one task: searches first, each in processes of its own, then the table in this one.

    Raises RuntimeError where a search ended otherwise than with a plan or in finding that none fits; all else is kept.
    """
    task: Task = context.shapes.tasks[context.item.subject]
    data: dict[str, Any] = {"spec": task.spec, "budgets": {}}
    for budget in task.budgets:
        data["budgets"][budget] = {"search": _searched(context, task, budget)}
        context.keep(data)
    spec = WorkloadSpec.model_validate(task.spec)
    with running(spec, context.device, PeerRunner) as (runner, units):
        rows = _rows(task, runner, units)
        alone = _alone(runner, rows)
        for budget in task.budgets:
            found = data["budgets"][budget]
            size = found["search"].get("budget bytes")
            if size is None:
                continue
            choices = found["search"].get("choices", {})
            ours = {OURS: _ours(choices)} | _given_our_loss(runner, rows, choices) if choices else {}
            found["rows"] = _table(runner, rows | ours, alone, size, task.rounds)
            if "input_ids" in runner.workload.batch:
                for row in (row for row in found["rows"].values() if "step" in row):
                    row["tokens a second"] = runner.workload.batch["input_ids"].numel() / row["step"]
            context.keep(data)
    if broke := [found["search"]["message"] for found in data["budgets"].values() if found["search"].get("broke")]:
        raise RuntimeError(f"a search broke: {broke[0]}")  # the next call tries again
    return data


def searches(context: Context) -> dict[str, Any]:
    """More searches, on smaller models: does each plan, measured again under its budget as a real limit, keep to it?"""
    given, budgets = context.shapes.searches[context.item.subject]
    task = Task(given, budgets, trials=6, seconds=25)
    found = {budget: _searched(context, task, budget) for budget in budgets}
    rows: dict[str, Any] = {}
    with running(WorkloadSpec.model_validate(given), context.device, PeerRunner) as (runner, _):
        for budget, search in found.items():
            rows[budget] = {"message": search.get("message", ""), "binding": search.get("binding")}
            if search.get("choices"):
                size = search["budget bytes"]
                rows[budget] |= {"budget": size} | _tried(runner, _ours(search["choices"]), size)
                if "peak" in rows[budget]:
                    rows[budget]["fill"] = rows[budget]["peak"] / size
            context.keep({"rows": rows})
    return {"rows": rows}


# --- the search -------------------------------------------------------------------------------------------------------


def _searched(context: Context, task: Task, budget: str) -> dict[str, Any]:
    """``autockpt search``: its plan and what finding it took; or why there is none."""
    job_file = context.out / f"{context.item.slug}.yaml"
    job_file.write_text(yaml.safe_dump(task.spec, sort_keys=False))
    command = [sys.executable, "-m", "autockpt", "search", "--job", str(job_file)]
    command += ["--budget", budget, "--device", context.device]
    command += ["--trials", str(task.trials), "--timeout", f"{task.seconds}s", "--json", *task.options]
    command += ["--out", str(context.out / "searches")]
    ran = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    words = " ".join(["autockpt", *command[3:-2]]).replace(str(job_file), job_file.name)
    if ran.returncode:
        said = [line for line in ran.stderr.splitlines() if line.strip()]
        message = " ".join(said[-4:])[:400] or f"ended with {ran.returncode}"
        return {"command": words, "message": message, "broke": ran.returncode != InfeasibleError.exit_code}
    outcome = json.loads(ran.stdout)
    plan = Plan.model_validate(outcome["plan"])
    return {
        "command": words,
        "budget bytes": outcome["budget"]["bytes"],
        "binding": outcome["binding"],
        "choices": {name: dump_choice(choice) for name, choice in plan.expand_planned().items()},
        "trials": outcome["measured_trials"],
        "seconds": outcome["seconds"],
        "predicted peak": plan.predicted.peak_bytes if plan.predicted else None,
        "peak": plan.measured.peak_bytes if plan.measured else None,
        "stages": [line for line in ran.stderr.splitlines() if line.endswith("…")],  # and the second each began
        "stopped": outcome["stopped"],
        "notes": outcome["notes"],
        "plan": str(outcome["plan_path"]),
    }


# --- the table --------------------------------------------------------------------------------------------------------


def _rows(task: Task, runner: StepRunner, units: list[str]) -> dict[str, Attach]:
    """Everybody else's ways, as the bench has them; of every n-th layer two, and some with other losses."""
    blocks = [unit for unit in discover_units(runner.workload.model) if unit.role == "block"]
    context = BenchContext(runner.workload, blocks, budgets={}, plain_peak=None)
    found: dict[str, Attach] = {}
    for name in (rival for rival in RIVALS if not PEERS[rival].missing(runner.device.kind)):
        for label, setting in PEERS[name].settings(context):
            if name != "every-n" or label in ("2", "4"):
                found[f"{name} {label}".strip()] = _peer(name, units, setting)
    for name, choices in plans(units, ("offload all", "recompute and offload")).items():
        found[f"our {name}"] = _ours({unit: dump_choice(choice) for unit, choice in choices.items()})
    for share in task.compiled:
        found[f"torch.compile {share:g}"] = _peer("torch.compile", units, {"budget": share, "backend": "inductor"})
    if task.losses:
        for loss, how in LOSSES.items():
            found |= {f"{name}, {loss}": partial(_both, how, found[name]) for name in ANY_LOSS if name in found}
    return found


def _given_our_loss(runner: StepRunner, rows: Mapping[str, Attach], choices: Mapping[str, Any]) -> dict[str, Attach]:
    """Rules of thumb with head and loss as our plan runs them, so that they are compared at the same loss."""
    head = discover_head(runner.workload.model)
    if head is None or choices.get(head.name, SAVE.kind) == SAVE.kind:
        return {}
    ours = _ours({head.name: choices[head.name]})
    return {f"{name}, our loss": partial(_both, ours, rows[name]) for name in ANY_LOSS if name in rows}


def _both(first: Attach, then: Attach, model: nn.Module) -> Callable[[], None]:
    with ExitStack() as stack:
        for how in (first, then):
            stack.callback(how(model))
        return stack.pop_all().close


def _peer(name: str, units: list[str], setting: Mapping[str, Any]) -> Attach:
    peer = PEERS[name]
    return lambda model: peer.attach(model, units, setting)


def _ours(choices: Mapping[str, Any]) -> Attach:
    parsed = {name: parse_choice(choice) for name, choice in choices.items()}
    return partial(_attached, parsed)


def _attached(parsed: Mapping[str, Any], model: nn.Module) -> Callable[[], None]:
    return attach(model, parsed).remove


def _alone(runner: StepRunner, rows: Mapping[str, Attach]) -> dict[str, dict[str, Any]]:
    """Every row's peak without a limit, or why it has none."""
    return {name: _tried(runner, how, None) for name, how in rows.items()}


def _tried(runner: StepRunner, how: Attach, limit: int | None) -> dict[str, Any]:
    try:
        measured = runner.measure(how, steps=1, budget_bytes=limit)
    except DeviceOutOfMemory as error:
        return {"state": "out of memory", "message": error.message[:200]}
    except AutockptError as error:
        return {"state": "failed", "message": error.message[:200]}
    except Exception as error:  # other projects' code, run as it is
        if device_lost(error):
            raise
        return {"state": "failed", "message": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"state": "fits", "peak": measured.peak_bytes, "allocated": measured.allocated_bytes}


def _in_turns(
    runner: StepRunner, rows: Mapping[str, Attach], found: dict[str, dict[str, Any]], budget: int, rounds: int
) -> dict[str, list[float]]:
    """Step times of all rows that fit, under the limit; one that runs out of memory leaves, and all begin again."""
    while fitting := {name: rows[name] for name, row in found.items() if row["state"] == "fits"}:
        try:
            with runner.device.limit(budget):
                return runner.compare(fitting, rounds=rounds)
        except DeviceOutOfMemory as error:
            gone = next((name for name in fitting if f"plan {name!r}" in error.message), None)
            if gone is None:
                raise
            found[gone] |= {"state": "out of memory", "message": f"in turns with others: {error.message[:150]}"}
    return {}


def _table(
    runner: StepRunner, rows: Mapping[str, Attach], alone: Mapping[str, dict[str, Any]], budget: int, rounds: int
) -> dict[str, Any]:
    """Who fits the budget as a real limit, and the step times of those, in turns under it."""
    found: dict[str, dict[str, Any]] = {}
    for name, how in rows.items():
        free = alone.get(name)
        if free is not None and free["state"] != "fits":
            found[name] = dict(free)
        elif free is not None and (free["allocated"] or free["peak"]) > budget:
            found[name] = dict(free) | {"state": "over"}
        else:
            found[name] = _tried(runner, how, budget)
            if found[name].get("peak", 0) > budget:  # where the device cannot enforce a limit
                found[name]["state"] = "over"
    times = _in_turns(runner, rows, found, budget, rounds)
    for name, seconds in times.items():
        row = found[name]
        row |= {"step": statistics.median(seconds), "noise": noise(seconds), "fill": row["peak"] / budget}
        if OURS in times and name != OURS:
            ratio = ratio_interval(times[OURS], seconds)
            row["ours over it"] = [ratio.low, ratio.value, ratio.high]
    return found
