"""``python -m tests.evidence.sweep [--only NAME ...] [--jobs N] [--seed N] [--out FILE]``."""

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # configs only, random weights: nothing is ever fetched

import torch

from tests.children import each_forked
from tests.evidence.sweep.configs import architectures
from tests.evidence.sweep.trial import Result, in_a_fork, warm_up
from tests.evidence.tables import head, row, table

SECONDS = 90.0
LONGEST = 400
NAMES = ("architecture", "class", "units", "traced", "plans equal", "s", "remark")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.sweep", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="types of config, such as llama")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table, as markdown, to this file")
    options = parser.parse_args()

    torch.set_num_threads(1)
    todo = architectures()
    if options.only:
        unknown = set(options.only) - {a.name for a in todo}
        if unknown:
            parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
        todo = [a for a in todo if a.name in options.only]
    warm_up()
    results = []
    print(head(NAMES), flush=True)
    trying = partial(in_a_fork, seed=options.seed)
    for fork in each_forked(deque(todo), trying, seconds=SECONDS, jobs=options.jobs):
        result = fork.said[-1] if fork.said else Result(fork.item.name, fork.item.cls)
        result.remarks[:0] = [f"its process died ({fork.ended})"] if fork.ended else []
        results.append(result)
        print(row(cells(result)), flush=True)
        if options.out:
            options.out.write_text(page(results), encoding="utf-8")
    print(f"\n{summary(results)}")
    return 1 if count(results, "UNEQUAL") else 0


def cells(result: Result) -> Iterator[object]:
    """Those of a row."""
    yield from (result.name, result.cls, result.units or "–", result.traced)
    equal = f"{result.equal}/{result.plans}" if result.plans else "–"
    yield f"{equal}, {result.refused} refused" if result.refused else equal
    yield f"{result.seconds:.1f}"
    remark = "; ".join((*result.failures, *result.remarks)).replace("\n", " ")
    yield remark.partition(" You can install it")[0][:LONGEST]  # advice that transformers adds


def page(results: Sequence[Result]) -> str:
    """Counts, then those that train plainly, then those that do not."""
    ordered = sorted(results, key=lambda result: (not result.trained, result.name))
    return f"{summary(ordered)}\n\n{table(NAMES, map(cells, ordered))}\n"


def summary(results: Sequence[Result]) -> str:
    trained = [r for r in results if r.trained]
    planned = [r for r in trained if r.plans]
    lines = [
        f"- architectures: {len(results)}; built and trained plainly: {len(trained)}",
        f"- ghost-traced: {sum(r.traced == 'yes' for r in trained)}, "
        f"recorded instead: {sum(r.traced == 'recorded' for r in trained)}, "
        f"neither: {sum(r.traced == 'no' for r in trained)}",
        f"- with units: {len(planned)}; every plan bit-equal: {sum(r.equal == r.plans for r in planned)}",
        f"- plans: {sum(r.plans for r in planned)}; bit-equal {sum(r.equal for r in planned)}, refused by name "
        f"{sum(r.refused for r in planned)}, unequal {count(planned, 'UNEQUAL')}, failed {count(planned, ' failed: ')}",
    ]
    return "\n".join(lines)


def count(results: Iterable[Result], word: str) -> int:
    return sum(word in failure for result in results for failure in result.failures)


if __name__ == "__main__":
    sys.exit(main())
