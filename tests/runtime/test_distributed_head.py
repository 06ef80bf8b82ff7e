"""Two processes that train together (gloo), with head and loss, or softmax alone, in chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autockpt.errors import ConflictError
from autockpt.policies.lazy_logits import LazyLogits
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, Choice, ChunkedLoss, ChunkedSoftmax
from tests.runtime.processes import in_two_processes, needs_gloo, two_steps
from tests.runtime.test_distributed import LLAMA, WAYS, shard

pytestmark = pytest.mark.slow


def train(
    rank: int,
    way: str,
    order: str,
    choices: dict[str, Choice] | None = None,
    own: bool = False,
    head_by_itself: bool = False,
) -> list[Tensor]:
    """Gradients of two steps; ``own``: with a loss of the caller's own, computed after the model's forward."""
    model, choices = LLAMA.make(), choices or {}
    if order == "before":
        attach(model, choices)
    if head_by_itself:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.lm_head)
    wrapped = shard(model, way)
    if order == "after":
        attach(wrapped, choices)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        out = wrapped(**batch, use_cache=False)
        assert isinstance(out.logits, LazyLogits) == (order != "never" and "lm_head" in choices)
        if not own:
            return out.loss
        return nn.functional.cross_entropy(out.logits.float().view(-1, 64), batch["labels"].view(-1))

    return two_steps(rank, model.parameters(), loss_of)


def order_of(way: str, own: bool) -> str:
    """Each way has both orders and both losses, and over all ways each order has both losses."""
    return "before" if own == (way == "fsdp2") else "after"


def chunked(rank: int) -> list[str]:
    """What goes wrong with a head whose weights are gathered with the whole model, and with one that is by itself."""
    choices: dict[str, Choice] = {"model.layers.0": RECOMPUTE, "lm_head": ChunkedLoss(tokens=50)}
    wrong = []
    for way in WAYS:
        for own in (False, True):
            order = order_of(way, own)
            wanted, got = train(rank, way, "never", own=own), train(rank, way, order, choices, own)
            away = max(float((a - b).norm() / b.norm()) for a, b in zip(got, wanted, strict=True))
            if away > (2e-2 if "16" in way else 1e-5):
                wrong.append(f"{way}, attached {order}, own loss {own}: {away}")
    model = LLAMA.make()
    attach(model, choices)
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.lm_head)
    fully_shard(model)
    try:
        model(**LLAMA.batch(), use_cache=False)
    except ConflictError as error:
        return wrong if "lm_head, which is sharded by itself" in str(error) else [*wrong, str(error)]
    return [*wrong, "a head that is sharded by itself is not refused"]


@needs_gloo
def test_ddp_and_fsdp2(tmp_path):
    assert in_two_processes(chunked, tmp_path) == []


def softmax(rank: int) -> list[str]:
    """Where gradients are not bit-equal; the head may be sharded by itself, too."""
    choices: dict[str, Choice] = {"model.layers.0": RECOMPUTE, "lm_head": ChunkedSoftmax(chunks=8)}
    wrong = []
    for way in WAYS:
        for own, alone in ((False, False), (True, False), (False, True)):
            if alone and way != "fsdp2":
                continue
            wanted = train(rank, way, "never", own=own, head_by_itself=alone)
            for order in ("before", "after") if alone else (order_of(way, own),):
                got = train(rank, way, order, choices, own, alone)
                if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
                    wrong.append(f"{way}, attached {order}, own loss {own}, head by itself {alone}")
    return wrong


@needs_gloo
def test_softmax_in_chunks_is_bit_equal(tmp_path):
    assert in_two_processes(softmax, tmp_path) == []
