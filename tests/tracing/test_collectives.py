"""Sharded steps as ghosts, under PyTorch's fake process group: no other rank is there."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autockpt.errors import UsageError
from autockpt.schema import Graph, WorkloadSpec
from autockpt.schema.choices import RECOMPUTE
from autockpt.tracing.traced_run import GhostRun
from tests.errors import raises
from tests.measuring.sharded_models import LAYERS, step_of
from tests.runtime.processes import in_processes, needs_gloo
from tests.tracing.reference import ghosts
from tests.tuning.small import TWO_LAYERS

pytestmark = [pytest.mark.slow, needs_gloo]
ALL = {f"layers.{i}": RECOMPUTE for i in range(LAYERS)}
MODELS = "tests.measuring.sharded_models"


def described(shard: Any, model: str = f"{MODELS}:whole", device: str = "cpu", **more: Any) -> list[Graph]:
    """The graphs of plain training and of recomputing every layer, on one rank of a described job."""
    spec = WorkloadSpec.model_validate({"model": model, "shard": shard} | more)
    return ghosts(spec, "save", "recompute", device=device)


def graphs(rank: int, kind: str, folder: str) -> None:
    """The same of a live step, in a process that believes itself one of two."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    run = GhostRun()
    run.take(step_of(kind, 2))
    for name, choices in (("save", {}), ("recompute", ALL)):
        graph = run.trace(choices)
        Path(folder, name).write_text(graph.model_dump_json())
    os._exit(0)


def live(kind: str, folder: Path) -> tuple[Graph, Graph]:
    in_processes(graphs, (kind, str(folder)), 1)
    save, recompute = (Graph.model_validate_json((folder / name).read_text()) for name in ("save", "recompute"))
    return save, recompute


def collectives(graph: Graph) -> Counter[str]:
    found = (op.target.split(".")[1] for op in graph.ops if "c10d" in op.target)
    return Counter(name for name in found if name != "_wrap_tensor_autograd")


def test_recomputing_gathers_no_more_under_fsdp2(tmp_path: Path) -> None:
    save, recompute = described(2)
    expected = {"_allgather_base_": 2 * LAYERS, "_reduce_scatter_base_": LAYERS}
    assert collectives(save) == collectives(recompute) == expected
    assert recompute.peak_bytes < save.peak_bytes
    peaks = [graph.peak_bytes for graph in live("fsdp2", tmp_path)]
    assert peaks == pytest.approx([save.peak_bytes, recompute.peak_bytes], abs=8)  # a number, in torch 2.11


def test_what_stays_is_divided() -> None:
    whole, one = described(None)[0], described(4)[0]
    for kind in ("weights", "optimizer states"):
        assert one.resident[kind] == pytest.approx(whole.resident[kind] / 4, rel=0.01)
    held = [sum(s.bytes for s in graph.held_gradients()) for graph in (whole, one)]
    assert 4 * held[1] == held[0]


def test_layers_that_are_not_resharded_stay_gathered() -> None:
    kept, freed = described("2 kept")[1], described(2)[1]
    assert collectives(kept)["_allgather_base_"] == LAYERS
    assert kept.peak_bytes > freed.peak_bytes


def test_replicas_reduce_their_shards_besides() -> None:
    hybrid, alone = described("2x2"), described(2)
    assert collectives(hybrid[0]) == collectives(alone[0]) | {"allreduce_": LAYERS}
    assert all("ranks2" in hybrid[0].signatures[op.signature] for op in hybrid[0].ops if "c10d" in op.target)
    assert [g.peak_bytes for g in hybrid] == pytest.approx([g.peak_bytes for g in alone], abs=64)  # that of the mesh


def test_recomputing_stops_before_a_layers_last_reduction() -> None:
    save, recompute = described(2, f"{MODELS}:by_itself")
    assert collectives(recompute)["all_reduce"] == collectives(save)["all_reduce"] > LAYERS
    assert recompute.peak_bytes < save.peak_bytes


@pytest.mark.parametrize("model", [TWO_LAYERS, "gemma3-tiny"])  # whose head is the embedding
def test_transformers_own_plan_divides_layers_embedding_and_head(model: str) -> None:
    whole, one = described(None, model, "cuda")[0], described("tp2", model, "cuda")[0]
    assert collectives(one)["all_reduce"] > 0
    assert one.resident["weights"] == pytest.approx(whole.resident["weights"] / 2, rel=0.05)


def test_adapters_are_divided_with_their_frozen_base() -> None:
    graph = described(2, "llama-tiny", "cuda", lora=4, dtype="bf16")[0]
    assert collectives(graph)["_reduce_scatter_base_"] < collectives(graph)["_allgather_base_"]


@pytest.mark.parametrize(
    "job",
    [
        {"model": "llama-tiny", "quantization": {"load_in_8bit": True}, "lora": 4, "shard": 2},
        {"model": "gpt2-tiny", "shard": "tp2"},
        {"model": "llama-tiny", "lora": 4, "shard": "tp2"},
        {"model": "llama-tiny", "shard": "tp4"},  # of two key-value heads
        {"model": "llama-tiny", "max_grad_norm": 1.0, "shard": "tp2"},
        {"model": f"{MODELS}:with_optimizer", "shard": 2},
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(job: dict[str, Any]) -> None:
    with raises(UsageError):
        described(**job)


def test_a_step_in_ddp_is_that_of_the_model_inside(tmp_path: Path) -> None:
    save, recompute = live("ddp", tmp_path)
    assert not collectives(save) and recompute.peak_bytes < save.peak_bytes


@pytest.mark.parametrize("shard", ["2", "tp2"])
def test_a_stage_of_a_pipeline_may_be_sharded(shard: str) -> None:
    whole = WorkloadSpec(model=TWO_LAYERS, batch_size=2, seq_len=64, accumulate=2, stage="0/2")
    (one,), (of_both,) = map(ghosts, (whole, whole.model_copy(update={"shard": shard})))
    assert of_both.peak_bytes < one.peak_bytes
