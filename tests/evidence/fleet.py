"""A sweep of eight simulated searches as Ray tasks on two cores, and one after the other.

    pip install ray
    OMP_NUM_THREADS=1 python -m tests.evidence.fleet

Two models, two cards, two lengths. One after the other, each search is a command of its own; the tasks call
``autockpt.search``, as in docs/cluster.md. Each way has a folder of runs and one of op times, empty at first.
Prints Markdown: seconds of both ways, and the table of the runs.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS, CARDS, LENGTHS = ("llama-small", "gpt2"), ("rtx4090", "h100"), ("256", "512")


def ask(model: str, card: str, length: str, out: Path) -> None:
    """One search, in a process of its own."""
    command = [sys.executable, "-m", "autockpt", "search", "--model", model, "--hardware", card, "--seq-len", length]
    command += ["--batch-size", "2", "--budget", "60%act", "-n", "4", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "AUTOCKPT_CACHE": str(out / "cache")}
    subprocess.run(command, check=True, capture_output=True, env=environment)


def task(model: str, card: str, length: str, out: Path) -> None:
    """One search, in a process that has had others."""
    os.environ |= {"OMP_NUM_THREADS": "1", "AUTOCKPT_CACHE": str(out / "cache")}
    import autockpt

    job: dict[str, Any] = {"hardware": card, "seq_len": int(length), "batch_size": 2}
    autockpt.search(model, **job, budget="60%act", trials=4, out=out, progress=False)


def main() -> None:
    import ray  # type: ignore[import-not-found]

    jobs = list(itertools.product(MODELS, CARDS, LENGTHS))
    with tempfile.TemporaryDirectory() as folder:
        serial, parallel = Path(folder, "serial"), Path(folder, "parallel")
        began = time.perf_counter()
        for job in jobs:
            ask(*job, serial)
        alone = time.perf_counter() - began
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        remote = ray.remote(num_cpus=1)(task)
        began = time.perf_counter()
        ray.get([remote.remote(*job, parallel) for job in jobs])
        together = time.perf_counter() - began
        print(f"{len(jobs)} searches: {alone:.0f} s one after the other, {together:.0f} s as Ray tasks on two cores, ")
        print(f"{alone / together:.2f} times as fast.\n", flush=True)
        listed = [sys.executable, "-m", "autockpt", "history", str(parallel)]
        print("```text\n" + subprocess.run(listed, check=True, capture_output=True, text=True).stdout + "```")


if __name__ == "__main__":
    main()
