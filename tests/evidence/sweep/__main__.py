"""``python -m tests.evidence.sweep [--only NAME ...] [--jobs N] [--seed N] [--out FILE]``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # configs only, random weights: nothing is ever fetched


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.evidence.sweep", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="types of config, such as llama")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table, as markdown, to this file")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    from tests.evidence.sweep.catalogue import architectures
    from tests.evidence.sweep.pool import run_all, warm_up
    from tests.evidence.sweep.table import HEADER, count, markdown, row, summary

    todo = architectures()
    if options.only:
        unknown = set(options.only) - {a.name for a in todo}
        if unknown:
            parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
        todo = [a for a in todo if a.name in options.only]
    warm_up()
    results = []
    print(HEADER, flush=True)
    for result in run_all(todo, options.jobs, options.seed):
        results.append(result)
        print(row(result), flush=True)
        if options.out:
            options.out.write_text(markdown(results), encoding="utf-8")
    print(f"\n{summary(results)}")
    return 1 if count(results, "UNEQUAL") else 0


if __name__ == "__main__":
    sys.exit(main())
