"""Is the found plan at least as fast as the best of the plans that people choose by hand? Paired and interleaved.

    OMP_NUM_THREADS=1 python -m tests.evidence.known_plans

For each budget: one search, then every fitting one of recompute all, every n-th and first k beside one another, and
the two fastest of them against it until the 95 % interval of the ratio is within ± 0.5 % or 20 rounds are done.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from autockpt.history.statistics import judge
from autockpt.measuring import WorkerMeasurer
from autockpt.schema import RECOMPUTE, SAVE, Choice, SearchRequest, WorkloadSpec, parse_budget, plan_hash
from autockpt.schema.choices import choice_kinds
from autockpt.tuning import run_search
from search_spaces.spaces import load_space
from tests.evidence.until import compare_until

SPEC = WorkloadSpec(model="llama-small", batch_size=2)
BUDGETS = ("40%act", "60%act", "80%act")
SPACES: tuple[tuple[str, ...], ...] = (
    choice_kinds(),
    ("save", "recompute", "keep_attention", "selective"),
    ("save", "recompute"),
)
TRIALS = 12


def known(units: list[str]) -> dict[str, dict[str, Choice]]:
    """Recompute all, every n-th unit, and the first k units."""
    n = len(units)
    plans: dict[str, dict[str, Choice]] = {"recompute all": dict.fromkeys(units, RECOMPUTE)}
    for every in range(2, n + 1):
        plans[f"every {every}"] = {u: RECOMPUTE if i % every == 0 else SAVE for i, u in enumerate(units)}
    for first in range(1, n):
        plans[f"first {first}"] = {u: RECOMPUTE if i < first else SAVE for i, u in enumerate(units)}
    return plans


def one(budget: str, kinds: tuple[str, ...], out: Path) -> None:
    """Search, then measure the found plan against its rivals; one line of the table."""
    begin = time.monotonic()
    request = SearchRequest(
        budget=parse_budget(budget),
        workload=SPEC,
        space=load_space("knobs").restricted(kinds),
        device="cpu",
        trials=TRIALS,
        out=out,
    )
    found = run_search(request)
    seconds = time.monotonic() - begin
    measuring = sum(s.seconds for s in found.stages if s.part)
    assert found.plan is not None
    with WorkerMeasurer(SPEC, "cpu") as worker:
        ours = found.plan.expand(found.plan.model.classes)
        blocks = [u for u in found.plan.model.classes if u in ours]
        rivals = {
            name: plan
            for name, plan in known(blocks).items()
            if worker.measure(plan, steps=1).peak_bytes <= found.budget.bytes
        }
        times = worker.compare(rivals, rounds=3)
        best = sorted(rivals, key=lambda name: statistics.median(times[name]))[:2]
        lines = [versus(worker, ours, name, rivals[name]) for name in best]
    strip = "".join(ours[u].letter for u in blocks)
    print(
        f"| {budget} | {', '.join(kinds)} | `{strip}` | {len(rivals)} | {'; '.join(lines)} "
        f"| {found.measured_trials} | {seconds:.0f} s, of these measured steps {measuring:.0f} s |",
        flush=True,
    )


def versus(worker: WorkerMeasurer, ours: Mapping[str, Choice], name: str, rival: Mapping[str, Choice]) -> str:
    """The ratio of step times, ours to the rival's, in words."""
    if plan_hash(ours) == plan_hash(rival):
        return f"{name}: the same plan"

    def draw(rounds: int) -> tuple[list[float], list[float]]:
        times = worker.compare({"ours": ours, "rival": rival}, rounds=rounds)
        return times["ours"], times["rival"]

    pair = compare_until(draw, at_most=20)
    verdict = {"faster": "ours faster", "slower": "ours slower", "undecided": "undecided"}[judge(pair.ratio)]
    return f"{name}: {pair.ratio} after {pair.rounds} rounds, {verdict}"


def main() -> None:
    """All budgets in all spaces."""
    print("| budget | choices | found plan | rivals that fit | ratio of step times, ours / rival | trials | search |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as out:
        for kinds in SPACES:
            for budget in BUDGETS:
                one(budget, kinds, Path(out))


if __name__ == "__main__":
    main()
