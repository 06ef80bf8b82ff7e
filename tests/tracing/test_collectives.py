"""Sharded steps as ghosts, under PyTorch's fake process group: no other rank is there."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autockpt.schema import Graph
from autockpt.schema.choices import RECOMPUTE
from autockpt.tracing.assemble import to_graph
from autockpt.tracing.run import GhostRun
from tests.measuring.sharded_models import LAYERS, step_of
from tests.runtime.processes import in_processes, needs_gloo

pytestmark = [pytest.mark.slow, needs_gloo]
ALL = {f"layers.{i}": RECOMPUTE for i in range(LAYERS)}


def graphs(rank: int, kind: str, folder: str) -> None:
    """The graphs of plain training and of recomputing every layer, in a process that believes itself one of two."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    run = GhostRun()
    run.take(step_of(kind, 2))
    for name, choices in (("save", {}), ("recompute", ALL)):
        graph = to_graph(run.trace(choices), run.units)
        Path(folder, name).write_text(graph.model_dump_json())
    os._exit(0)


def traced(kind: str, folder: Path) -> tuple[Graph, Graph]:
    in_processes(graphs, (kind, str(folder)), 1)
    save, recompute = (Graph.model_validate_json((folder / name).read_text()) for name in ("save", "recompute"))
    return save, recompute


def collectives(graph: Graph) -> Counter[str]:
    found = (op.target.split(".")[1] for op in graph.ops if "c10d" in op.target)
    return Counter(name for name in found if name != "_wrap_tensor_autograd")


def test_recomputing_gathers_no_more_under_fsdp2(tmp_path: Path) -> None:
    save, recompute = traced("fsdp2", tmp_path)
    assert (
        collectives(save)
        == collectives(recompute)
        == {
            "_allgather_base_": 2 * LAYERS,
            "_reduce_scatter_base_": LAYERS,
        }
    )
    assert recompute.peak_bytes < save.peak_bytes


def test_layers_that_are_not_resharded_stay_gathered(tmp_path: Path) -> None:
    for name in ("kept", "freed"):
        (tmp_path / name).mkdir()
    kept, freed = traced("no-resharding", tmp_path / "kept")[1], traced("fsdp2", tmp_path / "freed")[1]
    assert collectives(kept)["_allgather_base_"] == LAYERS
    assert kept.peak_bytes > freed.peak_bytes


def test_recomputing_stops_before_a_layers_last_reduction(tmp_path: Path) -> None:
    save, recompute = traced("tensor-parallel", tmp_path)
    assert collectives(recompute)["all_reduce"] == collectives(save)["all_reduce"] > LAYERS
    assert recompute.peak_bytes < save.peak_bytes


def test_a_step_in_ddp_is_that_of_the_model_inside(tmp_path: Path) -> None:
    save, recompute = traced("ddp", tmp_path)
    assert not collectives(save) and recompute.peak_bytes < save.peak_bytes
