"""Test what guides, papers and courses say about recompute and offload on one model: every claim, with its source.

    python -m tests.evidence.rules --model llama-2-7b --batch-size 4 --seq-len 2048 --hardware a100-80 > table.md

Prints a Markdown table: what each rule says, what it comes to for this model, what ghost runs and a roofline of the
card predict, and whether it holds. A rule holds with at least that memory saved, at most that time added, that factor
within 5 %, or an amount within its range. Where no page of a claim could be named it is common advice.
"""

from __future__ import annotations

import argparse

from autockpt.analysis.explain import ExplainRequest
from autockpt.schema import WorkloadSpec
from autockpt.shipped import load_hardware
from tests.evidence.rules.plans import rules


def main() -> None:
    """Print the table of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--attn")
    parser.add_argument("--lora", type=int)
    parser.add_argument("--hardware", required=True)
    options = vars(parser.parse_args())
    hardware = load_hardware(options.pop("hardware"))
    spec = WorkloadSpec.model_validate({name: value for name, value in options.items() if value is not None})
    print(rules(ExplainRequest(spec, hardware=hardware)).table())


if __name__ == "__main__":
    main()
