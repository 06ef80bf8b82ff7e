"""Searches inside torchrun in which ranks die at random moments, and what became of their trials (gloo, CPU).

    python -m tests.evidence.deaths [--deaths 100] [--seed 0]

Two ranks of a small model under FSDP2; the command line, with torchrun's launcher and its restarts. Each attempt but
the last of a search may end by SIGKILL, by an exception in a forward pass or by running out of memory there; rank and
moment are drawn. Moments are calls of a layer, so that deaths come everywhere in a search, however slow the machine is.
Launchers and ranks are forks of this process, which has imported everything. The timeout of collectives is 10 s in a
first step and 5 s afterwards. A hang is a time between a death and the next attempt that is longer than this timeout
and 35 s for the launcher to end the other rank, times the runnable processes per core. Plans are timed for shorter than
usual.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autockpt.cli.app import main as command_line
from autockpt.measuring import base, ranks
from autockpt.tuning.targets import measured
from tests.evidence.tables import table
from tests.measuring import sharded_models

KINDS = ("SIGKILL", "exception", "out of memory")
FIRST_TIMEOUT, TIMEOUT, ENDING = 10.0, 5.0, 35.0
ATTEMPTS, LATEST = 5, 120
"""Deaths of one search at most, and the layer's call in an attempt, counted in one rank, up to which it may die."""
STARTING = 30
"""A SIGKILL before so many calls comes as many tenths of a second after the attempt's start."""
OPTIONS = "--trials 2 --choices save,recompute --device cpu --budget 60%act"
Death = tuple[str, int, int]


def note(what: str, **more: Any) -> None:
    with Path("events.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "at": time.time(), **more}) + "\n")


def recorded_trials(folder: Path = Path()) -> list[str]:
    return [line for path in folder.glob("results/*/trials.jsonl") for line in path.read_text().splitlines()]


def rank_of_a_search(deaths: list[Death]) -> None:
    """One rank, which may be the one that dies in this attempt."""
    attempt, rank, own = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), os.getpid()
    kind, who, moment = deaths[attempt] if attempt < len(deaths) else (None, None, 0)
    if rank == 0:
        note("start", trials=recorded_trials())
    calls, forward = itertools.count(), sharded_models.Layer.forward

    def die() -> None:
        note("SIGKILL", rank=rank)
        os.kill(own, signal.SIGKILL)

    def fail(layer: Any, x: Any) -> Any:
        if os.getpid() == own and next(calls) == moment:
            if kind == "SIGKILL":
                threading.Timer(moment % 7 / 100, die).start()  # in the middle of an op, or between steps
                return forward(layer, x)
            note(str(kind), rank=rank)
            raise ValueError("drawn") if kind == "exception" else torch.OutOfMemoryError("drawn")
        return forward(layer, x)

    if rank == who and kind == "SIGKILL" and moment < STARTING:
        threading.Timer(moment / 10, die).start()
    elif rank == who:
        sharded_models.Layer.forward = fail
    sys.argv = ["autockpt", "search", "--job", "job.yaml", *OPTIONS.split()]
    command_line()


def launch(deaths: list[Death], folder: Path) -> None:
    """What torchrun does with ``--standalone --nproc-per-node 2``, with ranks that are forks of this process."""
    os.chdir(folder)
    os.environ["AUTOCKPT_CACHE"] = str(folder / "cache")
    log = os.open("log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    ranks.FIRST_TIMEOUT, ranks.LEAST_TIMEOUT, ranks.STEPS_OF_TIMEOUT = FIRST_TIMEOUT, TIMEOUT, 0
    base.SECONDS_PER_PLAN, measured.FINAL_SECONDS = 0.5, 2.0
    sharded_models.LAYERS = 2
    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "deaths"}
    config = LaunchConfig(1, 1, 2, max_restarts=ATTEMPTS, start_method="fork", **meeting)
    elastic_launch(config, rank_of_a_search)(deaths)


def search(deaths: list[Death], folder: Path) -> tuple[list[str], list[str], float]:
    """The kinds of deaths that one search met, what was wrong with it, and the longest way to a next attempt."""
    (folder / "job.yaml").write_text("model: tests.measuring.sharded_models:whole\nshard: 2\n")
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(deaths, folder))
    launcher.start()
    launcher.join()
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    met = [event["what"] for event in events if event["what"] != "start"]
    wrong, plans = list[str](), list(folder.glob("results/*/plan.yaml"))
    if launcher.exitcode or len(plans) != 1:
        said = re.findall("autockpt: .*", (folder / "log").read_text(errors="replace"))
        wrong.append(f"exit code {launcher.exitcode}, {len(plans)} plans: {said}")
    pairs = itertools.pairwise(events)
    longest = max((b["at"] - a["at"] for a, b in pairs if a["what"] != "start"), default=0.0)
    busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    if longest > (FIRST_TIMEOUT + ENDING) * busy:
        wrong.append("a hang")
    lines = recorded_trials(folder)
    for event in events:
        if event["what"] == "start" and (had := event["trials"]) != lines[: len(had)]:
            wrong.append("a trial was lost")
    tried = {(trial["number"], trial["plan_hash"]) for trial in map(json.loads, lines)}
    if len({number for number, _ in tried}) != len(tried) or len({plan for _, plan in tried}) != len(tried):
        wrong.append("a plan was measured twice")
    return met, wrong, longest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, count, searches, wrongs = random.Random(options.seed), Counter[str](), 0, 0
    while sum(count.values()) < options.deaths:
        left = options.deaths - sum(count.values())
        deaths = [(draw.choice(KINDS), draw.randrange(2), draw.randrange(LATEST)) for _ in range(min(left, ATTEMPTS))]
        with tempfile.TemporaryDirectory() as folder:
            met, wrong, longest = search(deaths, Path(folder))
        count.update(met)
        searches, wrongs = searches + 1, wrongs + bool(wrong)
        outcome = "; ".join(wrong) or "a plan"
        print(f"search {searches}: {', '.join(met) or 'no death'}: {outcome}; next within {longest:.0f} s", flush=True)
    names = ("deaths", *KINDS, "searches", "with a plan, nothing lost, no hang")
    of_kinds = (count[kind] for kind in KINDS)
    print(f"\n{table(names, [(sum(count.values()), *of_kinds, searches, searches - wrongs)])}")


if __name__ == "__main__":
    main()
