"""The found plan against the best of all 729 assignments of a six-layer model, every one really measured.

    OMP_NUM_THREADS=1 python results/search_cpu_202611/exhaustive.py

The minimum of hundreds of noisy numbers is too small, so the ten fastest that fit are measured again, interleaved with
the found plan, until the interval of the ratio to the best of them is within ± 0.5 % or 60 rounds are done.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path

from autockpt.history.statistics import compare_until, judge
from autockpt.measuring import WorkerMeasurer
from autockpt.schema import Choice, SearchRequest, WorkloadSpec, load_space, parse_budget, parse_choice
from autockpt.tuning import run_search

SPEC = WorkloadSpec(model=str(Path(__file__).with_name("six_layers.json")), batch_size=4, seq_len=128)
KINDS = ("save", "recompute", "offload")
BUDGET = "50%act"
TRIALS = 20


def main() -> None:
    """Search, enumerate, compare."""
    with tempfile.TemporaryDirectory() as out:
        request = SearchRequest(
            budget=parse_budget(BUDGET),
            workload=SPEC,
            space=load_space("knobs"),
            device="cpu",
            trials=TRIALS,
            out=Path(out),
        )
        found = run_search(request)
    assert found.plan is not None
    ours = found.plan.expand(found.plan.model.classes)
    blocks = list(ours)
    print(f"budget {BUDGET} = {found.budget.bytes} bytes; found {strip(ours)} with {found.measured_trials} trials")
    with WorkerMeasurer(SPEC, "cpu") as worker:
        seconds: dict[str, float] = {}
        plans: dict[str, dict[str, Choice]] = {}
        for kinds in itertools.product(KINDS, repeat=len(blocks)):
            plan = {u: parse_choice(k) for u, k in zip(blocks, kinds, strict=True)}
            measured = worker.measure(plan, steps=3)
            if measured.peak_bytes <= found.budget.bytes:
                plans[strip(plan)], seconds[strip(plan)] = plan, measured.step_seconds
        best = sorted(seconds, key=lambda name: seconds[name])[:10]
        print(f"{len(KINDS) ** len(blocks)} assignments measured, {len(plans)} fit; the ten fastest: {', '.join(best)}")
        times = worker.compare({name: plans[name] for name in best} | {"ours": ours}, rounds=15)
        for name in [*best, "ours"]:
            first = f"first {seconds[name] * 1e3:.1f} ms, " if name in seconds else ""
            print(f"  {name}: {first}again, interleaved: median {statistics.median(times[name]) * 1e3:.1f} ms")
        rival = min(best, key=lambda name: statistics.median(times[name]))

        def draw(rounds: int) -> tuple[list[float], list[float]]:
            pair = worker.compare({"ours": ours, "rival": plans[rival]}, rounds=rounds)
            return pair["ours"], pair["rival"]

        pair = compare_until(draw, at_most=60)
        print(f"ours / {rival}: {pair.ratio} after {pair.rounds} rounds;", end=" ")
        print(
            {"faster": "surely", "slower": "NOT", "undecided": "undecided, whether"}[judge(pair.ratio, 1.01)], end=" "
        )
        print("within 1 % of the best")


def strip(plan: dict[str, Choice]) -> str:
    """One character a unit."""
    return "".join({"save": ".", "recompute": "R", "offload": "O"}[choice.kind] for choice in plan.values())


if __name__ == "__main__":
    main()
