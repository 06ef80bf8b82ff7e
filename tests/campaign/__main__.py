"""``python -m tests.campaign [--pairs N] [--from N] [--like REGEX] [--out FILE]``, or ``--seed N``."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="N", help="number of the first pair")
    parser.add_argument("--like", metavar="REGEX", help="only pairs of programs one of whose families it is found in")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write every verdict as a line of JSON; goes on where a file ends"
    )
    parser.add_argument("--table", type=Path, metavar="FILE", help="write counts by family and choice as markdown")
    parser.add_argument("--seed", type=int, metavar="N", help="print one pair as a script and say how it ends")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    from tests.campaign.pool import in_child, run_all
    from tests.campaign.program import draw
    from tests.campaign.script import written
    from tests.campaign.table import markdown, summary
    from tests.campaign.trial import PLANS, Verdict, plan

    if options.seed is not None:
        program = draw(options.seed // PLANS)
        choices = plan(program, options.seed)[1]
        print(written(program, choices, in_child(options.seed, program, choices)))
        return 0
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
        if verdict.word in ("WRONG", "foreign", "CRASH", "HANG") or (verdict.word == "refused" and verdict.ordinary):
            print(
                f"{verdict.number} {verdict.word} [{verdict.choice}] {'; '.join(verdict.families)}: {verdict.detail}",
                flush=True,
            )
    print(f"\n{summary(verdicts)}\n{(len(verdicts) - known) / (time.monotonic() - began) * 60:.0f} pairs a minute")
    if options.table:
        options.table.write_text(markdown(verdicts), encoding="utf-8")
    return 1 if any(v.word in ("WRONG", "foreign", "CRASH", "HANG") for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
