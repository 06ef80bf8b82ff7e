"""Five searches with five seeds on a loaded machine: do the plans they name take the same time on a quiet one?

    for seed in 0 1 2 3 4; do
        OMP_NUM_THREADS=1 taskset -c 1 python results/search_cpu_202611/stability.py search $seed; done
    OMP_NUM_THREADS=1 taskset -c 0 python results/search_cpu_202611/stability.py rounds
    python results/search_cpu_202611/stability.py table > results/search_cpu_202611/stability.md

The 8-layer Llama of results/bench_cpu_202611 with a batch of 2 x 256, at 45 % of its activation range. The searches run
on a core that has other work all the while (test suites, other searches: the load averages are in the table), each with
op times of its own. ``rounds`` measures the five plans again, interleaved, with nothing else on the core, and continues
where it was interrupted.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
from pathlib import Path

from ablation import HERE, SPEC, append, load_lines, searched, strip

from autockpt.history.statistics import Interval, judge, ratio_interval
from autockpt.measuring import WorkerMeasurer
from autockpt.schema import parse_choice, plan_hash

BUDGET = "45%act"
SMALLER = SPEC.model_copy(update={"batch_size": 2})
LIMIT = 1.015
ROUNDS = 30
SEARCHES, LINES = "stability_searches.jsonl", "stability_rounds.jsonl"


def search(seed: int, path: Path) -> None:
    """One search, with op times of its own, and the load that it met."""
    append(path, searched(SMALLER, BUDGET, seed, go_on=False))


def rounds(searches: Path, lines: Path) -> None:
    """The plans of all seeds in turns; a plan that several named is measured once."""
    plans = {
        record["named"]: {name: parse_choice(data) for name, data in record["named_choices"].items()}
        for record in load_lines(searches)
    }
    with WorkerMeasurer(SMALLER, "cpu") as worker:
        while len(load_lines(lines)) < ROUNDS:
            times = worker.compare(plans, rounds=1)
            append(lines, {plan_hash(plans[h]): round(seconds[0], 5) for h, seconds in times.items()})


def table(searches: Path, lines: Path) -> None:
    """What each seed named, and all ratios."""
    found = sorted(load_lines(searches), key=lambda record: record["seed"])
    done = load_lines(lines)
    print("| seed | plan | measured trials | search | load average, before and after | again: median |")
    print("|--:|---|--:|--:|--:|--:|")
    for record in found:
        again = statistics.median(line[record["named"]] for line in done)
        trials = sum(bool(t["times"]) for t in record["trials"])
        load = ", ".join(f"{value:.1f}" for value in record["load"])
        plan = strip(record["named_choices"])
        print(f"| {record['seed']} | `{plan}` | {trials} | {record['seconds']:.0f} s | {load} | {again * 1e3:.1f} ms |")
    print("\n| plans of seeds | ratio of step times | differ by less than 1.5 % |")
    print("|---|---|---|")
    for one, other in itertools.combinations(found, 2):
        seeds = f"{one['seed']}, {other['seed']}"
        if one["named"] == other["named"]:
            print(f"| {seeds} | the same plan | yes |")
            continue
        ratio = ratio_interval([r[one["named"]] for r in done], [r[other["named"]] for r in done], robust=True)
        print(f"| {seeds} | {ratio} after {len(done)} rounds | {_within(ratio)} |")


def _within(ratio: Interval) -> str:
    below = judge(ratio, LIMIT) == "faster" and ratio.low > 1 / LIMIT
    beyond = judge(ratio, LIMIT) == "slower" or ratio.high < 1 / LIMIT
    return "surely" if below else "NO" if beyond else "undecided"


def main() -> None:
    """See above; the variable STABILITY_FOLDER names another folder for the files."""
    verb, *rest = sys.argv[1:]
    folder = Path(os.environ.get("STABILITY_FOLDER", HERE))
    if verb == "search":
        search(int(rest[0]), folder / SEARCHES)
    elif verb == "rounds":
        rounds(folder / SEARCHES, folder / LINES)
    else:
        table(folder / SEARCHES, folder / LINES)


if __name__ == "__main__":
    main()
