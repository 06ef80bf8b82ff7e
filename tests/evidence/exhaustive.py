"""The found plan against the best of all 729 assignments of a six-layer model, every one really measured.

    OMP_NUM_THREADS=1 python -m tests.evidence.exhaustive

For two sets of three choices, each at three budgets. The minimum of hundreds of noisy numbers is too small, so the ten
fastest that fit are measured again, interleaved with the found plan, until the interval of the ratio to the best of
them is within ± 0.5 % or 60 rounds are done.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autockpt.measuring import WorkerMeasurer
from autockpt.measuring.statistics import judge
from autockpt.schema import Choice, SearchRequest, WorkloadSpec, parse_budget, parse_choice
from autockpt.shipped import load_space
from autockpt.tuning import run_search
from tests.evidence.until import compare_until

RESULTS = Path(__file__).resolve().parents[2] / "results"
SPEC = WorkloadSpec(model=str(RESULTS / "search_cpu_202611" / "six_layers.json"), batch_size=4, seq_len=128)
SETS = (("save", "recompute", "offload"), ("save", "recompute", "remake"))
BUDGETS = ("30%act", "50%act", "70%act")
TRIALS = 20
LETTERS = {"save": ".", "recompute": "R", "offload": "O", "remake": "M"}

Plan = Mapping[str, Choice]


def main() -> None:
    """For each set of choices: search at every budget, enumerate, compare."""
    for kinds in SETS:
        found = [search(budget, kinds) for budget in BUDGETS]
        with WorkerMeasurer(SPEC, "cpu") as worker:
            measured = enumerate_all(worker, list(found[0][0]), kinds)
            for ours, limit in found:
                compare(worker, measured, ours, limit)


def search(budget: str, kinds: tuple[str, ...]) -> tuple[Plan, int]:
    """The found plan, and the budget in bytes."""
    with tempfile.TemporaryDirectory() as out:
        request = SearchRequest(
            budget=parse_budget(budget),
            workload=SPEC,
            space=load_space("knobs").restricted(kinds),
            device="cpu",
            trials=TRIALS,
            out=Path(out),
        )
        found = run_search(request)
    assert found.plan is not None
    ours = found.plan.expand(found.plan.model.classes)
    size, trials = found.budget.bytes, found.measured_trials
    print(f"{' / '.join(kinds)}, {budget} = {size} bytes: found {strip(ours)} with {trials} trials", flush=True)
    return ours, size


def enumerate_all(worker: WorkerMeasurer, blocks: list[str], kinds: tuple[str, ...]) -> dict[str, tuple[int, float]]:
    """Peak bytes and step seconds of every assignment, by its letters."""
    measured: dict[str, tuple[int, float]] = {}
    for chosen in itertools.product(kinds, repeat=len(blocks)):
        plan = {u: parse_choice(k) for u, k in zip(blocks, chosen, strict=True)}
        answer = worker.measure(plan, steps=3)
        measured[strip(plan)] = answer.peak_bytes, answer.step_seconds
    return measured


def compare(worker: WorkerMeasurer, measured: dict[str, tuple[int, float]], ours: Plan, limit: int) -> None:
    """Measure the ten fastest that fit and ours again, and judge ours against the best of them."""
    fitting = {name: seconds for name, (peak, seconds) in measured.items() if peak <= limit}
    best = sorted(fitting, key=lambda name: fitting[name])[:10]
    plans = {name: restored(name, ours) for name in best}
    print(f"{limit} bytes: {len(measured)} assignments measured, {len(fitting)} fit; ours {strip(ours)}; the fastest:")
    times = worker.compare({**plans, "ours": ours}, rounds=15)
    for name in [*best, "ours"]:
        first = f"first {fitting[name] * 1e3:.1f} ms, " if name in fitting else ""
        print(f"  {name}: {first}again, interleaved: median {statistics.median(times[name]) * 1e3:.1f} ms")
    rival = min(best, key=lambda name: statistics.median(times[name]))

    def draw(rounds: int) -> tuple[list[float], list[float]]:
        pair = worker.compare({"ours": ours, "rival": plans[rival]}, rounds=rounds)
        return pair["ours"], pair["rival"]

    pair = compare_until(draw, at_most=60)
    sure = {"faster": "surely", "slower": "NOT", "undecided": "undecided, whether"}[judge(pair.ratio, 1.01)]
    print(f"  ours / {rival}: {pair.ratio} after {pair.rounds} rounds; {sure} within 1 % of the best", flush=True)


def restored(name: str, like: Plan) -> Plan:
    """The plan of these letters."""
    kinds = {letter: kind for kind, letter in LETTERS.items()}
    return {unit: parse_choice(kinds[letter]) for unit, letter in zip(like, name, strict=True)}


def strip(plan: Plan) -> str:
    """One character a unit."""
    return "".join(LETTERS[choice.kind] for choice in plan.values())


if __name__ == "__main__":
    main()
