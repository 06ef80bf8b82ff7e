"""Two processes that train together (gloo): a plan on every rank, gradients bit-equal with plain training."""

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from autockpt.errors import ConflictError
from autockpt.policies.lazy_logits import LazyLogits
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, Choice, ChunkedLoss, ChunkedSoftmax, Segment, choice_kinds, parse_choice
from tests.errors import raises
from tests.policies.zoo import CASES, Ops, number
from tests.runtime.processes import needs_gloo, on_ranks, two_steps

pytestmark = pytest.mark.slow

LLAMA = CASES["llama"]
NAMES = [f"model.layers.{i}" for i in range(3)]
WAYS = ("ddp", "fsdp2", "fsdp2 in 16 bits")
Choices = dict[str, Choice] | None
SEGMENT: dict[str, Choice] = dict.fromkeys(NAMES, Segment(size=3))


@pytest.fixture(scope="module", autouse=True)
def _first_forward() -> None:
    """What it imports, every rank would import again."""
    LLAMA.make()(**LLAMA.batch())


def shard(model: Any, way: str) -> Any:
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way.startswith("fsdp1"):
        strategy = ShardingStrategy.FULL_SHARD if "full" in way else ShardingStrategy.SHARD_GRAD_OP
        options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": "original" in way}
        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)
    from torch.distributed.device_mesh import init_device_mesh

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if "16" in way else None)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def plans() -> dict[str, dict[str, Choice]]:
    """Every kind of choice on some layer, beside others, and a segment over all layers."""
    kinds = sorted(choice_kinds("block"))
    result = {}
    for start in range(0, len(kinds), len(NAMES)):
        beside = {name: parse_choice(kinds[(start + i) % len(kinds)]) for i, name in enumerate(NAMES)}
        result["beside one another: " + ", ".join(c.kind for c in beside.values())] = beside
    return result | {"one segment": SEGMENT}


class Run(NamedTuple):
    """What two training steps left on this rank: its share of all gradients, all-gathers, keys."""

    gradients: list[Tensor]
    gathers: tuple[int, int]
    keys: list[str]


def train(
    rank: int,
    way: str,
    choices: Choices = None,
    order: str = "",
    own: bool = False,
    own_loss: bool = False,
    head_by_itself: bool = False,
) -> Run:
    """``own``: transformers' own recompute of every layer; ``own_loss``: one that is computed after the forward."""
    model = LLAMA.make()
    if own:
        model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
    if choices and order == "before":
        attach(model, choices)
    if head_by_itself:
        fully_shard(model.lm_head)
    wrapped = shard(model, way)
    if choices and order == "after":
        attach(wrapped, choices)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        out = wrapped(**batch, use_cache=False)
        assert isinstance(out.logits, LazyLogits) == ("lm_head" in (choices or ()))
        if not own_loss:
            return out.loss
        return nn.functional.cross_entropy(out.logits.float().view(-1, 64), batch["labels"].view(-1))

    ops = Ops() if way.startswith("fsdp2") else None  # which takes a third of the time
    with ops or nullcontext():
        seen = two_steps(rank, wrapped.parameters(), loss_of)
    assert len(seen) == 2 * len(list(wrapped.parameters())) or way.startswith("fsdp1")
    gathers = (number(ops.forward, "allgather"), number(ops.backward, "allgather")) if ops else (0, 0)
    return Run(seen, gathers, list(wrapped.state_dict()))


def differ(wanted: Run, got: Run) -> bool:
    same = wanted.gradients and len(got.gradients) == len(wanted.gradients)
    return not same or not all(map(torch.equal, got.gradients, wanted.gradients))


def differences(way: str, wanted: Run, recomputed: Run, got: Run) -> Iterator[str]:
    if differ(wanted, got):
        yield "gradients"
    if got.gathers != recomputed.gathers or (way != "ddp" and not all(got.gathers)):
        yield f"all-gathers: {got.gathers}, not {recomputed.gathers}"
    if got.keys != wanted.keys:
        yield "keys"


def all_plans(rank: int) -> list[str]:
    wrong = []
    for way in WAYS:
        wanted, recomputed = train(rank, way), train(rank, way, own=True)
        orders = ("after", "before") if way == "fsdp2" else ("before", "after")
        for (what, choices), order in zip(plans().items(), cycle(orders)):
            got = train(rank, way, choices, order)
            wrong += [f"{way}, {what}, attached {order}: {d}" for d in differences(way, wanted, recomputed, got)]
    return wrong


@needs_gloo
def test_ddp_and_fsdp2(tmp_path):
    assert on_ranks(all_plans, tmp_path) == []


def all_plans_under_fsdp1(rank: int) -> list[str]:
    """The older engine. Where it gives parameters back after forward, a segment of several units cannot run again."""
    wrong = []
    for way in ("fsdp1, full, original", "fsdp1"):
        wanted, orders = train(rank, way), ("before", "after") if "full" in way else ("after", "before")
        for (what, choices), order in zip(plans().items(), cycle(orders)):
            refused, expected = "", "are sharded while it runs again" if choices is SEGMENT and "full" in way else ""
            try:
                equal = not differ(wanted, train(rank, way, choices, order))
            except ConflictError as error:
                equal, refused = True, str(error)
            if not equal or bool(refused) != bool(expected) or expected not in refused:
                wrong.append(f"{way}, {what}, attached {order}: {refused or 'gradients, or not refused'}")
    return wrong


@needs_gloo
def test_fsdp1(tmp_path):
    assert on_ranks(all_plans_under_fsdp1, tmp_path) == []


# --- the output head: with its loss, or softmax alone, in chunks


def chunked(rank: int, choice: Choice) -> list[str]:
    """What goes wrong with a head whose weights are gathered with the whole model, and with one that is by itself."""
    choices: dict[str, Choice] = {NAMES[0]: RECOMPUTE, "lm_head": choice}
    cases = [(way, way != "fsdp2", False, "after" if way == "ddp" else "before") for way in WAYS]
    cases += [("fsdp2", True, True, "after")] if choice.exact else []
    wrong = []
    for way, own, alone, order in cases:
        wanted = train(rank, way, own_loss=own, head_by_itself=alone)
        got = train(rank, way, choices, order, own_loss=own, head_by_itself=alone)
        pairs = list(zip(got.gradients, wanted.gradients, strict=True))
        rounding = 0 if choice.exact else 2e-2 if "16" in way else 1e-5
        if max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in pairs) > rounding:
            wrong.append(f"{way}, attached {order}, own loss {own}, head by itself {alone}")
    return wrong


def head_that_is_sharded_by_itself(rank: int) -> list[str]:
    model = LLAMA.make()
    attach(model, {"lm_head": ChunkedLoss(tokens=50)})
    fully_shard(model.lm_head)
    fully_shard(model)
    with raises(ConflictError, "chunked_loss cannot be used on lm_head"):
        model(**LLAMA.batch(), use_cache=False)
    return []


@needs_gloo
@pytest.mark.parametrize("choice", [ChunkedLoss(tokens=50), ChunkedSoftmax(chunks=8)], ids=lambda choice: choice.kind)
def test_heads_in_chunks(choice, tmp_path):
    assert on_ranks(partial(chunked, choice=choice), tmp_path) == []


@needs_gloo
def test_a_head_that_is_sharded_by_itself_has_no_loss_in_chunks(tmp_path):
    assert on_ranks(head_that_is_sharded_by_itself, tmp_path) == []
