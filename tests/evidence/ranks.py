"""Bytes that each rank of a sharded job holds: predicted without the ranks, measured on all of them (gloo, CPU).

    OMP_NUM_THREADS=1 python -m tests.evidence.ranks [SHARD …]

A Llama of 6 layers, hidden 256, 4 × 128 tokens, fp32, AdamW, sharded as SHARD says, which is a job file's ``shard``;
with a stage behind a comma (``2,0/2``) that stage of llama-tiny, 4 micro-batches of 2 × 128 tokens.
Peaks are the smallest of three recordings on each rank, and the largest of these counts.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autockpt.measuring import Ranks
from autockpt.schema import WorkloadSpec
from autockpt.schema.choices import GATHERED, OFFLOAD, RECOMPUTE, Choice, parse_choice
from autockpt.tracing import Tracer
from autockpt.workload import build
from tests.evidence.tables import head, row
from tests.policies.heads import small_llama
from tests.runtime.processes import in_processes

LAYERS, VOCABULARY, ROWS, LENGTH = 6, 1024, 4, 128
SHARDS = ("2", "2 kept", "tp2", "4", "4 kept", "2x2", "2x2 kept", "tp4", "2,0/2", "2,1/2", "tp2,0/2")
GATHERING = ("2", "4", "2x2")
AGAIN = parse_choice({"kind": "recompute", "gathered": True})
KEPT = parse_choice({"kind": "selective", "keep": ["mlp.gate_proj", "self_attn.q_proj"]})


def llama() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
    model = small_llama(vocab_size=VOCABULARY, use_cache=False, tie_word_embeddings=False, **sizes)()
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return model.train(), {"input_ids": ids, "labels": ids}


def job(shard: str) -> WorkloadSpec:
    shard, _, stage = shard.partition(",")
    given: dict[str, Any] = {"model": "tests.evidence.ranks:llama"}
    if stage:
        given = {"model": "llama-tiny", "batch_size": 2, "seq_len": LENGTH, "accumulate": 4, "stage": stage}
    return WorkloadSpec.model_validate({**given, "shard": shard})


def plans(shard: str) -> dict[str, dict[str, Choice]]:
    stage = job(shard).stage
    names = [f"model.layers.{i}" for i in (range(LAYERS) if stage is None else (0, 1) if stage == "0/2" else (2, 3))]
    found: dict[str, dict[str, Choice]] = {
        "save": {},
        "recompute": dict.fromkeys(names, RECOMPUTE),
        "every second": dict.fromkeys(names[1::2], RECOMPUTE),
        "selective": dict.fromkeys(names, KEPT),
        "offload": dict.fromkeys(names, OFFLOAD),
    }
    if shard in GATHERING:
        found["every second gathered"] = dict.fromkeys(names[1::2], GATHERED)
        found["recompute, every second gathered"] = found["recompute"] | dict.fromkeys(names[1::2], AGAIN)
    return found


def measure(rank: int, shard: str, folder: str) -> None:
    """One rank's part; the first one writes the peaks of every plan, by rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=job(shard).ranks)
    with Ranks(build(job(shard)), shard) as measurer:
        if rank:
            measurer.serve()
        else:
            found = measurer.conduct(
                lambda: {name: measurer.measure(plan, steps=1).peak_by_rank for name, plan in plans(shard).items()}
            )
            Path(folder, "peaks").write_text(json.dumps(found))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shards", nargs="*", metavar="SHARD", help=", ".join(SHARDS))
    print(head(("shard", "plan", "largest peak, bytes", "range of ranks", "predicted", "error")), flush=True)
    for shard in parser.parse_args().shards or SHARDS:
        with Tracer.from_spec(job(shard)) as tracer:
            predicted = {name: tracer.trace(plan).peak_bytes for name, plan in plans(shard).items()}
        with tempfile.TemporaryDirectory() as folder:
            in_processes(measure, (shard, folder), job(shard).ranks)
            measured = json.loads(Path(folder, "peaks").read_text())
        for name, peaks in measured.items():
            most, apart, said = max(peaks), max(peaks) - min(peaks), predicted[name]
            print(row((shard, name, f"{most:,}", f"{apart:,}", f"{said:,}", f"{said / most - 1:+.2%}")), flush=True)


if __name__ == "__main__":
    main()
