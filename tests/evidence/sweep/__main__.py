"""``python -m tests.evidence.sweep [--only NAME ...] [--jobs N] [--seed N] [--out FILE]``."""

from __future__ import annotations

import argparse
import os
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # configs only, random weights: nothing is ever fetched

import torch

from tests.children import each_forked
from tests.evidence.sweep.configs import architectures
from tests.evidence.sweep.trial import Result, in_a_fork, warm_up

SECONDS = 90.0
_LONGEST = 240
HEADER = "| architecture | class | units | traced | plans equal | s | remark |\n|---|---|--:|---|---|--:|---|"


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
    print(HEADER, flush=True)
    trying = partial(in_a_fork, seed=options.seed)
    for fork in each_forked(deque(todo), trying, seconds=SECONDS, jobs=options.jobs):
        result = fork.said[-1] if fork.said else Result(fork.item.name, fork.item.cls)
        result.remarks[:0] = [f"its process died ({fork.ended})"] if fork.ended else []
        results.append(result)
        print(row(result), flush=True)
        if options.out:
            options.out.write_text(markdown(results), encoding="utf-8")
    print(f"\n{summary(results)}")
    return 1 if count(results, "UNEQUAL") else 0


def row(result: Result) -> str:
    equal = f"{result.equal}/{result.plans}" if result.plans else "–"
    if result.refused:
        equal += f", {result.refused} refused"
    remark = "; ".join((*result.failures, *result.remarks)).replace("|", "\\|").replace("\n", " ")
    cells = (result.name, result.cls, result.units or "–", result.traced, equal, f"{result.seconds:.1f}", remark)
    return f"| {' | '.join(map(str, cells))} |"


def markdown(results: Iterable[Result]) -> str:
    """Counts, then a table of those that train plainly, then one of those that do not."""
    ordered = sorted(results, key=lambda r: r.name)
    trained = [r for r in ordered if r.trained]
    rest = [r for r in ordered if not r.trained]
    parts = [summary(ordered), "## Trained\n", "\n".join((HEADER, *map(row, trained)))]
    if rest:
        reasons = [f"| {r.name} | {r.cls} | {_short('; '.join(r.remarks).replace('|', '/'))} |" for r in rest]
        parts += [
            "## Not trained plainly\n",
            "\n".join(("| architecture | class | reason |", "|---|---|---|", *reasons)),
        ]
    return "\n\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def _short(text: str) -> str:
    text = text.partition(" You can install it")[0]  # advice that transformers adds
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


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
