"""Bytes of quantised and adapted models on the CPU: ghost runs against real steps.

``python -m tests.evidence.quantised DIRECTORY`` writes ``bytes.csv`` there, a row for each configuration and plan, and
prints the worst and the median difference. Real peaks are read off the allocator's events of a third step.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from autockpt.schema.choices import OFFLOAD, RECOMPUTE
from autockpt.schema.workload import WorkloadSpec
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.tracing.reference import Real
from tests.tracing.test_accuracy import mixed, uniform

NF4 = {"load_in_4bit": True}
FP4 = {"quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": "bfloat16"}}
INT8 = {"load_in_8bit": True}
ALL: dict[str, Any] = {"lora_targets": "all-linear"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama, nf4 twice, bf16": {"model": "llama-tiny", "dtype": "bf16", **NF4},
    "llama, nf4 twice, bf16, all linear layers": {"model": "llama-tiny", "dtype": "bf16", **NF4, **ALL},
    "llama, nf4 twice, autocast, DoRA": {"model": "llama-tiny", "autocast": "bf16", "lora_dora": True, **NF4},
    "llama, fp4, fp32, two micro-batches": {"model": "llama-tiny", "accumulate": 2, **FP4},
    "llama, int8, bf16, head trained whole": {
        "model": "llama-tiny", "dtype": "bf16", "lora_modules_to_save": "lm_head", **INT8,
    },
    "llama, int8, fp32, all linear layers": {"model": "llama-tiny", **INT8, **ALL},
    "qwen3, nf4 twice, bf16, all linear layers": {"model": "qwen3-tiny", "dtype": "bf16", **NF4, **ALL},
    "gemma3, nf4 twice, bf16, eager attention": {"model": "gemma3-tiny", "dtype": "bf16", "attn": "eager", **NF4},
    "gpt2, int8, fp32": {"model": "gpt2-tiny", **INT8},
    "mixtral, nf4 twice, bf16, attention adapted": {
        "model": "mixtral-tiny", "dtype": "bf16", "lora_targets": "q_proj,k_proj,v_proj,o_proj", **NF4,
    },
    "t5, nf4 twice, fp32": {"model": "t5-tiny", **NF4},
    "bert, int8, bf16, SGD": {"model": "bert-tiny", "dtype": "bf16", "optimizer": "sgd", **INT8},
}  # fmt: skip


def main(folder: str) -> None:
    """Run every configuration under four plans."""
    torch.set_num_threads(1)
    rows: list[tuple[str, str, int, int]] = []
    for name, options in CONFIGURATIONS.items():
        spec = WorkloadSpec(**({"lora": 8, "batch_size": 4, "seq_len": 256} | options))
        with Tracer.from_spec(spec, fallback=False) as tracer:
            plans = {
                "save all": {},
                "recompute all": uniform(RECOMPUTE, tracer.units),
                "offload all": uniform(OFFLOAD, tracer.units),
                "mixed": mixed(tracer.units),
            }
            ghosts = {plan: tracer.trace(choices).peak_bytes for plan, choices in plans.items()}
        workload = build(spec)
        rows += [(name, plan, ghosts[plan], Real(workload, choices).peak_bytes) for plan, choices in plans.items()]
        worst = max(abs(ghost / real - 1) for n, _, ghost, real in rows if n == name)
        print(f"{name}: at most {worst:.3%}", flush=True)
    with open(Path(folder) / "bytes.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("configuration", "plan", "ghost_peak_bytes", "real_peak_bytes"))
        writer.writerows(rows)
    errors = [abs(ghost / real - 1) for _, _, ghost, real in rows]
    print(f"{len(rows)} peaks: median {statistics.median(errors):.4%}, worst {max(errors):.3%}")


if __name__ == "__main__":
    main(sys.argv[1])
