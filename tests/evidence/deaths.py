"""Searches inside torchrun in which ranks die at random moments, and what became of their trials (gloo, CPU).

    python -m tests.evidence.deaths [--deaths 100] [--seed 0]

Two ranks of a small model under FSDP2; the command line, with ``--max-restarts``. Each attempt but the last of a search
may end by SIGKILL, by an exception in a forward pass or by running out of memory there; rank and moment are drawn. The
timeout of collectives is 10 s in a first step and 5 s afterwards. A hang is a time between a death and the next attempt
that is longer than this timeout and what the launcher and the interpreters take.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

KINDS = ("SIGKILL", "exception", "out of memory")
FIRST_TIMEOUT, TIMEOUT, STARTING = 10.0, 5.0, 45.0
ATTEMPTS, LATEST = 5, 20.0
"""Deaths of one search at most, and seconds after an attempt's start in which it may die."""
PLACE = "TESTS_EVIDENCE_DEATHS"


def note(what: str, **more: Any) -> None:
    with Path(os.environ[PLACE], "events.jsonl").open("a") as file:
        file.write(json.dumps({"what": what, "at": time.time(), **more}) + "\n")


def rank_of_a_search() -> None:
    """One rank, which may be the one that dies in this attempt."""
    from autockpt.cli.app import main
    from autockpt.measuring import ranks
    from tests.measuring import sharded_models

    ranks.FIRST_TIMEOUT, ranks.LEAST_TIMEOUT, ranks.STEPS_OF_TIMEOUT = FIRST_TIMEOUT, TIMEOUT, 0
    attempt, rank, own = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), os.getpid()
    deaths = json.loads(Path(os.environ[PLACE], "deaths.json").read_text())
    kind, who, moment = deaths[attempt] if attempt < len(deaths) else (None, None, 0.0)
    if rank == 0:
        trials = [line for path in Path("results").glob("*/trials.jsonl") for line in path.read_text().splitlines()]
        note("start", trials=trials)
    if rank == who and kind == "SIGKILL":

        def die() -> None:
            note(kind, rank=rank)
            os.kill(own, signal.SIGKILL)

        timer = threading.Timer(moment, die)
        timer.daemon = True
        timer.start()
    elif rank == who:
        began, forward = time.monotonic(), sharded_models.Layer.forward

        def fail(layer: Any, x: Any) -> Any:
            if os.getpid() == own and time.monotonic() - began > moment:
                sharded_models.Layer.forward = forward
                note(kind, rank=rank)
                raise ValueError("drawn") if kind == "exception" else __import__("torch").OutOfMemoryError("drawn")
            return forward(layer, x)

        sharded_models.Layer.forward = fail
    sys.argv = ["autockpt", *sys.argv[1:]]
    main()


def search(deaths: list[tuple[str, int, float]], folder: Path) -> tuple[list[str], list[str]]:
    """The kinds of deaths that one search met, and what was wrong with it."""
    (folder / "job.yaml").write_text("model: tests.measuring.sharded_models:whole\nshard: 2\n")
    (folder / "deaths.json").write_text(json.dumps(deaths))
    root = str(Path(__file__).parents[2])
    environment = os.environ | {PLACE: str(folder), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(ATTEMPTS)]
    options = ["--trials", "2", "--choices", "save,recompute,offload", "--device", "cpu", "--budget", "60%act"]
    command = [sys.executable, "-m", *launcher, "-m", __spec__.name, "search", "--job", "job.yaml", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    met = [event["what"] for event in events if event["what"] != "start"]
    wrong = []
    plans = list(folder.glob("results/*/plan.yaml"))
    if done.returncode or len(plans) != 1:
        wrong.append(f"exit code {done.returncode}, {len(plans)} plans: {re.findall('autockpt: .*', done.stderr)}")
    for before, after in pairwise(events):
        if before["what"] != "start" and (took := after["at"] - before["at"]) > FIRST_TIMEOUT + STARTING:
            wrong.append(f"{took:.0f} s after {before['what']} until the next attempt")
    lines = [line for path in folder.glob("results/*/trials.jsonl") for line in path.read_text().splitlines()]
    for event in events:
        if event["what"] == "start" and (had := event["trials"]) != lines[: len(had)]:
            wrong.append("a trial was lost")
    measured = {(trial["number"], trial["plan_hash"]) for trial in map(json.loads, lines)}
    if len({number for number, _ in measured}) != len(measured) or len({plan for _, plan in measured}) != len(measured):
        wrong.append("a plan was measured twice")
    return met, wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deaths", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, count, searches, wrongs = random.Random(options.seed), Counter[str](), 0, 0
    while sum(count.values()) < options.deaths:
        left = options.deaths - sum(count.values())
        deaths = [(draw.choice(KINDS), draw.randrange(2), draw.uniform(2, LATEST)) for _ in range(min(left, ATTEMPTS))]
        with tempfile.TemporaryDirectory() as folder:
            met, wrong = search(deaths, Path(folder))
        count.update(met)
        searches, wrongs = searches + 1, wrongs + bool(wrong)
        print(f"search {searches}: {', '.join(met) or 'no death'}: {'; '.join(wrong) or 'a plan'}", flush=True)
    print("\n| deaths | " + " | ".join(KINDS) + " | searches | with a plan, nothing lost, no hang |")
    print("|--:" * (len(KINDS) + 3) + "|")
    kinds = " | ".join(str(count[kind]) for kind in KINDS)
    print(f"| {sum(count.values())} | {kinds} | {searches} | {searches - wrongs} |")


if __name__ == "__main__":
    if PLACE in os.environ:
        rank_of_a_search()
    else:
        main()
