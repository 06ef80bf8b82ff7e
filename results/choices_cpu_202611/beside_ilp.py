"""Real steps of the plans of ``bound.py`` beside those of PyTorch's SAC ILP: time in turns, peak, gradients.

    OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=70368744177664 MALLOC_MMAP_THRESHOLD_=33554432 \
        python results/choices_cpu_202611/beside_ilp.py > results/choices_cpu_202611/beside_ilp.md

Arguments: seconds of rounds (default 240), budgets (default all four). The ILP's sets are those that
``results/bench_cpu_202611`` got from it and found to fit each budget. Overheads are of paired rounds (Hodges-Lehmann,
95 % signed-rank interval).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from autockpt.history.statistics import ratio_interval
from autockpt.measuring import WorkerMeasurer
from autockpt.schema import WorkloadSpec

HERE = Path(__file__).parent
BENCH = HERE.parent / "bench_cpu_202611"
SPEC = WorkloadSpec(model=str(BENCH / "llama.json"), batch_size=8, seq_len=256, optimizer="none", packed=True)
ASKED = {
    "85%": "asked for 85%",
    "60%": "asked for 60% × 0.93",
    "45%": "asked for 45% × 0.93",
    "30%": "asked for 30% × 0.93",
}
PLAIN = "save everything"
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 240.0
BUDGETS = sys.argv[2:] or list(ASKED)


def rows() -> dict[str, dict[str, Any]]:
    """What is measured: by name, a peer of ``autockpt bench`` and its setting."""
    found: dict[str, dict[str, Any]] = {PLAIN: {"peer": "autockpt", "setting": {"choices": {}}}}
    lines = (BENCH / "bench-llama_cpu_8aa6cc67" / "settings.jsonl").read_text().splitlines()
    by_peer = {line["peer"]: dict(line["settings"]) for line in map(json.loads, lines)}
    for budget, choices in json.loads((HERE / "llama_plans.json").read_text()).items():
        if budget not in BUDGETS:
            continue
        found[f"{budget} ours"] = {"peer": "autockpt", "setting": {"choices": choices}}
        ilp = by_peer["torch SAC ILP"].get(ASKED[budget])
        if ilp is not None:
            found[f"{budget} SAC ILP"] = {"peer": "torch SAC ILP", "setting": ilp}
    return found


def main() -> None:
    """One line per row, and one per budget for ours against the ILP's."""
    payload = rows()
    with WorkerMeasurer(SPEC, "cpu") as worker:
        facts = {name: worker.call("autockpt.bench.worker:prepare", row) for name, row in payload.items()}
        times: dict[str, list[float]] = {name: [] for name in payload}
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            turn = worker.call("autockpt.bench.worker:take_turns", {"rows": payload})
            for name, seconds in turn["seconds"].items():
                times[name].append(seconds)
    print(f"{len(times[PLAIN])} rounds.\n\n| | peak | of plain | gradients | overhead | 95 % interval |")
    print("|---|--:|--:|---|--:|--:|")
    whole = facts[PLAIN]["peak_bytes"]
    for name, fact in facts.items():
        ratio = ratio_interval(times[name], times[PLAIN]) if name != PLAIN else None
        over = "— | —" if ratio is None else f"{ratio.value - 1:+.1%} | {ratio.low - 1:+.1%} … {ratio.high - 1:+.1%}"
        peak = fact["peak_bytes"]
        print(f"| {name} | {peak / 2**20:.0f} MiB | {peak / whole:.1%} | {fact['gradients']} | {over} |")
    print("\n| budget | step time of ours over the ILP's | overhead of ours over the ILP's |\n|---|--:|--:|")
    for budget in ASKED:
        mine, theirs = times.get(f"{budget} ours"), times.get(f"{budget} SAC ILP")
        if mine and theirs:
            ratio = ratio_interval(mine, theirs)
            share = (ratio_interval(mine, times[PLAIN]).value - 1) / (ratio_interval(theirs, times[PLAIN]).value - 1)
            print(f"| {budget} | {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] | {share:.2f} |")


if __name__ == "__main__":
    main()
