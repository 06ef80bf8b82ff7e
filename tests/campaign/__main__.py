"""``python -m tests.campaign [--pairs N] [--from N] [--like REGEX] [--out FILE]``.

``print(source(draw(N // PLANS)))`` shows the program of pair N, ``Trials().run(N)`` runs it.
"""

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from tests.campaign.pool import run_all
from tests.campaign.program import draw
from tests.campaign.trial import PLANS, Verdict

WORDS = ("equal", "refused", "WRONG", "foreign", "CRASH", "HANG")
BAD = WORDS[2:]
UNFIT = ("invalid", "unsteady")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="number of the first pair")
    parser.add_argument("--like", metavar="REGEX", help="only pairs of programs one of whose families it is found in")
    parser.add_argument("--out", type=Path, metavar="FILE", help="a line of JSON a pair; goes on where the file ends")
    options = parser.parse_args()

    torch.set_num_threads(1)
    verdicts: list[Verdict] = []
    if options.out and options.out.exists():
        verdicts = [Verdict(**json.loads(line)) for line in options.out.read_text(encoding="utf-8").splitlines()]
    known, began = len(verdicts), time.monotonic()
    out = options.out.open("a", encoding="utf-8") if options.out else None
    numbers = range(options.first, options.first + options.pairs)
    if options.like:
        alike = [any(re.search(options.like, f) for f in draw(n).families) for n in range(numbers.stop // PLANS + 1)]
        numbers = [number for number in numbers if alike[number // PLANS]]
    for verdict in run_all(numbers[known:]):
        verdicts.append(verdict)
        if out:
            out.write(json.dumps(asdict(verdict)) + "\n")
            out.flush()
        if verdict.word in BAD or (verdict.word == "refused" and verdict.ordinary):
            families = "; ".join(verdict.families)
            print(f"{verdict.number} {verdict.word} [{verdict.choice}] {families}: {verdict.detail}", flush=True)
    print(f"\n{summary(verdicts)}\n{(len(verdicts) - known) / (time.monotonic() - began) * 60:.0f} pairs a minute")
    return 1 if any(v.word in BAD for v in verdicts) else 0


def summary(verdicts: Sequence[Verdict]) -> str:
    """One line of counts over all pairs that could serve."""
    counts = Counter(v.word for v in verdicts)
    said, unfit = (", ".join(f"{word} {counts[word]}" for word in words) for words in (WORDS, UNFIT))
    ordinary = sum(v.word == "refused" and v.ordinary for v in verdicts)
    fit = sum(counts[word] for word in WORDS)
    return f"{fit} pairs: {said}; ordinary ones refused {ordinary}; not counted: {unfit}"


if __name__ == "__main__":
    sys.exit(main())
