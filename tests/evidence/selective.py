"""Recompute with sets of kept outputs: how much step time do the search's plans cost at four budgets?

    OMP_NUM_THREADS=1 python -m tests.evidence.selective

An 8-layer Llama (hidden 256, 8 × 256 tokens, fp32, no optimizer), a usual subject of op-level recompute.
Budgets are shares of the save-everything peak, weights left out of both. For each, one search over save, recompute,
keep_attention and selective; then its plan and the fastest fitting "first k layers recomputed" in turns with
save-everything, until the 95 % interval of the ratio is within ± 0.5 % or 20 rounds are done.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from autockpt.measuring import WorkerMeasurer
from autockpt.schema import RECOMPUTE, Choice, SearchRequest, WorkloadSpec, parse_budget
from autockpt.shipped import load_space
from autockpt.tracing import Tracer
from autockpt.tuning import run_search
from tests.evidence.until import compare_until

LLAMA = Path(__file__).resolve().parents[2] / "results" / "choices_cpu_202611" / "llama8.json"
SPEC = WorkloadSpec(model=str(LLAMA), batch_size=8, seq_len=256, optimizer="none")
SHARES = (0.84, 0.60, 0.43, 0.26)
KINDS = ("save", "recompute", "keep_attention", "selective")
TRIALS = 10


def overhead(worker: WorkerMeasurer, plan: Mapping[str, Choice]) -> str:
    """The plan's step time over save-everything's, with its interval."""

    def draw(rounds: int) -> tuple[list[float], list[float]]:
        times = worker.compare({"plan": plan, "save everything": {}}, rounds=rounds)
        return times["plan"], times["save everything"]

    ratio = compare_until(draw, at_most=20).ratio
    return f"{ratio.value - 1:+.1%} [{ratio.low - 1:+.1%}, {ratio.high - 1:+.1%}]"


def main() -> None:
    """One line per budget."""
    with Tracer.from_spec(SPEC) as tracer:
        graph = tracer.trace()
        blocks = [u.name for u in tracer.units if u.role == "block"]
        first = {k: dict.fromkeys(blocks[:k], RECOMPUTE) for k in range(1, len(blocks) + 1)}
        peaks = {k: tracer.trace(plan).peak_bytes for k, plan in first.items()}
    above = graph.peak_bytes - graph.resident_bytes
    print(f"save everything: {above / 2**20:.1f} MiB above weights and batch\n")
    print("| asked | reached | overhead | plan | first k layers recomputed | its overhead |")
    print("|---|---|---|---|---|---|", flush=True)
    for share in SHARES:
        budget = graph.resident_bytes + int(share * above)
        with tempfile.TemporaryDirectory() as out:
            found = run_search(
                SearchRequest(
                    budget=parse_budget(f"{budget / 2**20:.3f}MiB"),
                    workload=SPEC,
                    space=load_space("knobs").restricted(KINDS),
                    device="cpu",
                    trials=TRIALS,
                    out=Path(out),
                )
            )
        assert found.plan is not None and found.plan.measured is not None
        ours = found.plan.expand(found.plan.model.classes)
        reached = (found.plan.measured.peak_bytes - graph.resident_bytes) / above
        k = min((k for k, peak in peaks.items() if peak <= budget), default=None)
        with WorkerMeasurer(SPEC, "cpu") as worker:
            plan = "; ".join(f"{pattern}: {choice}" for pattern, choice in found.plan.choices.items())
            rival = "none fits |" if k is None else f"{k} ({(peaks[k] - graph.resident_bytes) / above:.0%}) | "
            rival += "" if k is None else overhead(worker, first[k])
            print(f"| {share:.0%} | {reached:.0%} | {overhead(worker, ours)} | {plan} | {rival} |", flush=True)


if __name__ == "__main__":
    main()
