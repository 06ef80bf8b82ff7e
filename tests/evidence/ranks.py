"""Bytes that each rank of a sharded step holds: predicted by a ghost run on one, measured on all (gloo, CPU).

    OMP_NUM_THREADS=1 python -m tests.evidence.ranks [--ranks N] [KIND …]

A Llama of 6 layers, hidden 256, 4 × 128 tokens, fp32, AdamW, sharded by PyTorch's own engines as KIND says. Peaks are
the smallest of three recordings on each rank, and the largest of these counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autockpt
from autockpt.measuring import Ranks
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, Choice, parse_choice
from autockpt.tracing import Tracer
from tests.runtime.processes import in_processes

LAYERS, HIDDEN, VOCABULARY, ROWS, LENGTH = 6, 256, 1024, 4, 128
KEPT = parse_choice({"kind": "selective", "keep": ["mlp.gate_proj", "self_attn.q_proj"]})
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=704, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=VOCABULARY, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def fsdp2(model: nn.Module, ranks: int, *, reshard: bool = True, replicas: int = 1) -> None:
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if replicas > 1 else mesh["shard"]
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)


def tensor_parallel(model: nn.Module, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:  # type: ignore[union-attr]
        rows = ("self_attn.o_proj", "mlp.down_proj")
        plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, plan)


KINDS = {
    "fsdp2": fsdp2,
    "no-resharding": lambda model, ranks: fsdp2(model, ranks, reshard=False),
    "hybrid": lambda model, ranks: fsdp2(model, ranks, replicas=2),
    "tensor-parallel": tensor_parallel,
}


def plans() -> dict[str, dict[str, Choice]]:
    names = [f"model.layers.{i}" for i in range(LAYERS)]
    return {
        "save": {},
        "recompute": dict.fromkeys(names, RECOMPUTE),
        "every second": dict.fromkeys(names[1::2], RECOMPUTE),
        "selective": dict.fromkeys(names, KEPT),
        "offload": dict.fromkeys(names, OFFLOAD),
    }


def measure(rank: int, kind: str, ranks: int, folder: str) -> None:
    """One rank's part; the first one writes the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    model = llama()
    KINDS[kind](model, ranks)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    step = autockpt.Step(model, {"input_ids": ids, "labels": ids}, optimizer=optimizer)
    with Ranks(step, kind) as measurer:
        if rank:
            measurer.serve()
        else:
            Path(folder, "rows").write_text("".join(measurer.conduct(lambda: rows(measurer, step, kind))))
    os._exit(0)


def rows(measurer: Ranks, step: autockpt.Step, kind: str) -> list[str]:
    made = []
    with Tracer.from_step(step, fallback=False) as tracer:
        for name, choices in plans().items():
            predicted, found = tracer.trace(choices).peak_bytes, measurer.measure(choices, steps=1)
            peaks = found.peak_by_rank
            error = predicted / found.peak_bytes - 1
            made.append(
                f"| {kind} | {len(peaks)} | {name} | {max(peaks):,} | {max(peaks) - min(peaks):,} | {predicted:,} | "
                f"{error:+.2%} |\n"
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    print("| sharding | ranks | plan | largest peak, bytes | range of ranks | predicted | error |")
    print("|---|--:|---|--:|--:|--:|--:|", flush=True)
    for kind in given.kinds or [kind for kind in KINDS if kind != "hybrid" or given.ranks > 2]:
        with tempfile.TemporaryDirectory() as folder:
            in_processes(measure, (kind, given.ranks, folder), given.ranks)
            print(Path(folder, "rows").read_text(), end="", flush=True)


if __name__ == "__main__":
    main()
