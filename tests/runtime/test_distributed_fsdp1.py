"""Two processes with the older FullyShardedDataParallel: gradients under a plan are bit-equal with plain training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, Segment
from tests.runtime.processes import in_two_processes, needs_gloo, two_steps
from tests.runtime.test_distributed import LLAMA, NAMES, side_by_side

pytestmark = pytest.mark.slow


def plans() -> dict[str, dict[str, Choice]]:
    """Every kind of choice, side by side, and segments over all layers."""
    result = side_by_side()
    result["one segment"] = dict.fromkeys(NAMES, Segment(size=3))
    return result


def train(rank: int, shard: partial[Any], choices: dict[str, Choice] | None = None, order: str = "") -> list[Tensor]:
    """The gradients of two steps on this rank."""
    model = LLAMA.make()
    if choices and order == "before":
        attach(model, choices)
    kinds = {type(model.model.layers[0])}  # type: ignore[reportGeneralTypeIssues]
    wrapped = shard(model, auto_wrap_policy=ModuleWrapPolicy(kinds), device_id=torch.device("cpu"))
    if choices and order == "after":
        attach(wrapped, choices)
    return two_steps(rank, wrapped.parameters(), lambda batch: wrapped(**batch, use_cache=False).loss)


def differences(rank: int, shard: partial[Any], freed: bool, orders: Sequence[str]) -> Iterator[str]:
    """``freed``: parameters are given back after forward, so a segment of several sharded units cannot run again.

    Plans are attached by turns in one of ``orders``.
    """
    wanted = train(rank, shard)
    for (what, choices), order in zip(plans().items(), cycle(orders)):
        try:
            got = train(rank, shard, choices, order)
        except ConflictError as error:
            if not ("one segment" in what and freed and "are sharded while it runs again" in str(error)):
                yield f"{what}, attached {order}: {error}"
            continue
        if "one segment" in what and freed:
            yield f"{what}, attached {order}: not refused"
        elif not wanted or len(got) != len(wanted) or not all(map(torch.equal, got, wanted)):
            yield f"{what}, attached {order}: gradients"


def all_plans(rank: int) -> list[str]:
    """Each plan under all pairs of a strategy, of a kind of parameters, and of an order."""
    wrong = []
    for original in (False, True):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            shard = partial(FullyShardedDataParallel, use_orig_params=original, sharding_strategy=strategy)
            freed = strategy is ShardingStrategy.FULL_SHARD
            orders = ("before", "after") if original == freed else ("after", "before")
            wrong += [f"{strategy}, {original=}, {d}" for d in differences(rank, shard, freed, orders)]
    return wrong


@needs_gloo
def test_gradients(tmp_path):
    assert in_two_processes(all_plans, tmp_path) == []
