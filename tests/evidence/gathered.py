"""What weights that stay gathered gain: simulated searches of a job of eight GPUs, with such choices and without.

    python -m tests.evidence.gathered [HARDWARE:BUDGET …]

llama-3b, 1 × 2048 tokens, bf16, AdamW, ``shard: 8``.
"""

from __future__ import annotations

import argparse

import autockpt
from autockpt.schema.choices import head_kinds, searched_kinds
from autockpt.schema.words import tally
from tests.evidence.tables import head, row

CASES = ("rtx4090:9GB", "rtx4090:14GB", "h100:14GB")


def found(hardware: str, budget: str, *, gathered: bool) -> autockpt.Plan:
    job = {"batch_size": 1, "seq_len": 2048, "dtype": "bf16", "shard": 8}
    choices = None if gathered else [*searched_kinds(), *head_kinds()]
    return autockpt.search("llama-3b", hardware=hardware, budget=budget, choices=choices, progress=False, **job)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", metavar="HARDWARE:BUDGET", help=", ".join(CASES))
    print(head(("hardware", "budget", "gathered", "peak", "step", "plan")), flush=True)
    for case in parser.parse_args().cases or CASES:
        hardware, _, budget = case.partition(":")
        for gathered in (False, True):
            plan = found(hardware, budget, gathered=gathered)
            reading, done = plan.predicted, tally(plan.expand_planned())
            assert reading is not None and reading.step_seconds is not None
            figures = f"{reading.peak_bytes / 1e9:.2f} GB", f"{1e3 * reading.step_seconds:.0f} ms"
            print(row((hardware, budget, "searched" if gathered else "left out", *figures, done)), flush=True)


if __name__ == "__main__":
    main()
