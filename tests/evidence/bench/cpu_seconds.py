"""The same comparison by the CPU seconds of one thread, for a machine that other work shares.

    OMP_NUM_THREADS=1 python -m tests.evidence.bench.cpu_seconds FILE.json

Search and steps run in one process, whose clock for steps is its CPU time: waiting for a core does not count, what
others do to caches does. The file names the model and its batch (``spec``), ``budgets`` and ``trials`` of our searches,
``rows`` of peers (name, setting, label), ours with the bytes of its budget in ``limits``, and ``rounds``. Gradients are
not compared here: see the bench.
"""

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autockpt.devices import get_device
from autockpt.measuring.statistics import ratio_interval
from autockpt.schema import SearchRequest, SearchSpace, WorkloadSpec, dump_choices, format_binary, parse_budget
from autockpt.tuning import run_search
from autockpt.workload import build, discover_units
from tests.evidence.bench.peers import OURS, PEERS, PLAIN
from tests.evidence.bench.worker import PeerRunner
from tests.evidence.tables import table


def main(path: Path) -> None:
    asked = json.loads(path.read_text(encoding="utf-8"))
    time.perf_counter = time.process_time  # type: ignore[assignment]
    torch.set_num_threads(1)
    step = build(WorkloadSpec(optimizer="none", packed=True, **asked["spec"]), torch.device("cpu"))
    space = SearchSpace().without(["offload", "recompute_offload"])  # files are no memory, and so would win
    rows: dict[str, tuple[str, Any]] = {f"{name} {label}".strip(): (name, data) for name, data, label in asked["rows"]}
    limits: dict[str, int] = asked.get("limits", {})
    for text in asked["budgets"]:
        request = SearchRequest(budget=parse_budget(text), step=step, space=space, trials=asked["trials"])
        found = run_search(request)
        assert found.plan is not None
        rows[f"{OURS} {text}"] = (OURS, {"choices": dump_choices(found.plan.expand_planned())})
        limits[f"{OURS} {text}"] = found.budget.bytes
        print(f"{text}: {found.plan.expand_planned()}", flush=True)
    runner = PeerRunner(step, get_device("cpu"))
    units = [unit.name for unit in discover_units(step.model) if unit.role == "block"]

    def attached(row: tuple[str, Any]) -> Any:
        return partial(PEERS[row[0]].attach, units=units, setting=row[1])

    peaks = {key: runner.measure(attached(row), steps=1).peak_bytes for key, row in rows.items()}
    times: dict[str, list[float]] = {key: [] for key in rows}
    plain = next(key for key, row in rows.items() if row[0] == PLAIN)
    for _ in range(asked["rounds"]):
        for key, seconds in runner.compare({key: attached(row) for key, row in rows.items()}, rounds=1).items():
            times[key] += seconds
    taken = {key: f"{statistics.median(seconds):.3f}" for key, seconds in times.items()}
    methods = [(k, format_binary(peaks[k]), taken[k], ratio_interval(times[k], times[plain])) for k in rows]
    print(table(("method", "peak", "CPU seconds", "over plain"), methods))
    rivals = [(ours, k) for ours, most in limits.items() for k in rows if k not in limits and peaks[k] <= most]
    duels = [(ours, key, ratio_interval(times[ours], times[key])) for ours, key in rivals]
    print(f"\n{table(('budget', 'rival that fits', 'ours over its'), duels)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
