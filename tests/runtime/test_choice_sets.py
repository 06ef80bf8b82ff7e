"""Several sets of choices on one model, chosen at each forward by the batch that comes in."""

import copy
import io
import os
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt import Plan, apply
from autockpt.checkpointing.replay_context import recomputing
from autockpt.errors import ConflictError, PlanError
from autockpt.policies.base import attached_to
from autockpt.runtime import remove
from autockpt.runtime.choice_sets import BatchSets, BatchSize, batch_size
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, parse_choice
from tests.errors import raises
from tests.policies.zoo import CASES, assert_equal
from tests.runtime.processes import needs_gloo, on_ranks

LLAMA = CASES["llama"]
LAYERS = "model.layers.0-2"
KINDS: list[Choice] = [
    parse_choice(c) for c in ("recompute", "remake", "keep_attention", "offload", "recompute_offload", "selective")
] + [parse_choice({"kind": "segment", "size": 3})]


def batch(length: int, rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(length))
    return {"input_ids": ids, "labels": ids}


def sets(*bounds: int, of: tuple[Choice, ...] = (OFFLOAD, RECOMPUTE)) -> Plan:
    """Choices for batches of up to so many tokens, save first; the last ones are for all others, too."""
    choices = ({"model.layers.2": "recompute"}, *({LAYERS: c} for c in of))
    smaller = [
        {"when": {"tokens": n}, "choices": c} for n, c in zip(bounds[:-1], choices[-len(bounds) : -1], strict=True)
    ]
    return Plan.model_validate({"choices": choices[-1], "when": {"tokens": bounds[-1]}, "smaller_batches": smaller})


def gradients(model: nn.Module, lengths: tuple[int, ...], *, at_once: bool = False) -> dict[str, Any]:
    """Of one accumulation; ``at_once``: all forwards come before the backwards."""
    torch.manual_seed(1)
    losses = []
    for length in lengths:
        losses.append(model(**batch(length), use_cache=False).loss)
        if not at_once:
            losses.pop().backward()
    for loss in reversed(losses):
        loss.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def used(handle: Any) -> dict[int, int]:
    assert isinstance(handle._session, BatchSets)
    return dict(handle._session.used)


@pytest.mark.slow
def test_each_forward_goes_by_its_batch_with_equal_gradients() -> None:
    lengths = (8, 64, 20, 8, 64)
    wanted = gradients(LLAMA.make(), lengths)
    model = LLAMA.make()
    with apply(model, sets(16, 64, 128)) as handle:
        for _ in range(3):
            assert_equal(gradients(model, lengths), wanted)
        assert used(handle) == {0: 6, 1: 3, 2: 6}
        said = str(handle)
        assert "batches up to 16 tokens (6 forwards" in said and "up to 128 tokens, and larger" in said
        assert handle.sentinels.checks > 0
        with torch.no_grad():
            model(**batch(8))
        assert used(handle)[0] == 6
        assert handle.sentinels.passes == 15
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KINDS)), ids=lambda n: KINDS[n].kind)
def test_a_backward_goes_by_what_its_forward_went_by(number: int) -> None:
    """Each kind is first and second twice."""
    lengths = (64, 16, 64, 16)
    wanted = gradients(LLAMA.make(), lengths, at_once=True)
    for other in (1, 3):
        pair = KINDS[number], KINDS[(number + other) % len(KINDS)]
        model = LLAMA.make()
        with apply(model, sets(32, 128, of=pair), sentinels="all"):
            assert_equal(gradients(model, lengths, at_once=True), wanted)


@pytest.mark.slow
def test_a_larger_batch_takes_the_leanest_set_and_says_so_once() -> None:
    model = LLAMA.make()
    with apply(model, sets(16, 64)) as handle:
        with pytest.warns(UserWarning, match=r"no choices for a batch of 128 tokens.* \(up to 64 tokens\)"):
            gradients(model, (64,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            gradients(model, (64, 8))
        assert used(handle) == {0: 1, 1: 2}


def test_the_size_of_batches_of_all_kinds() -> None:
    ids, module = torch.zeros(2, 8, dtype=torch.long), nn.Identity()
    assert batch_size(module, (ids,), {}) == BatchSize(16, 8)
    assert batch_size(module, (), {"labels": torch.zeros(2), "inputs_embeds": torch.zeros(2, 8, 4)}) == (16, 8)
    assert batch_size(module, (), {"pixel_values": torch.zeros(2, 3, 4, 5)}) == (40, 20)
    assert batch_size(module, (), {"input_ids": ids[:, :3], "decoder_input_ids": ids}) == (16, 8)
    assert batch_size(module, (), {"input_ids": ids[:1], "max_length_q": 5}) == (8, 5)
    assert batch_size(module, (), {"flag": True}) is None
    module.config = type("Config", (), {"is_encoder_decoder": True})()
    assert batch_size(module, (), {"input_ids": ids[:, :3], "labels": ids}) == (16, 8)


@pytest.mark.slow
def test_copies_and_pickles_choose_for_themselves() -> None:
    lengths = (8, 64)
    wanted = gradients(LLAMA.make(), lengths)
    model = LLAMA.make()
    with apply(model, sets(16, 128)) as handle:
        gradients(model, lengths)
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (twin, torch.load(file, weights_only=False)):
            assert_equal(gradients(other, lengths), wanted)
            guard = attached_to(other)
            assert guard is not None and guard.state.sets.used == {0: 2, 1: 2}  # type: ignore[attr-defined]
            remove(other)
            assert not any("forward" in m.__dict__ for m in other.modules())
            assert_equal(gradients(other, lengths), wanted)
        assert used(handle) == {0: 1, 1: 1}


def inside_or_whole() -> Plan:
    """What runs again under one set holds modules that another set chooses for."""
    inside = {"model.layers.0.mlp": "recompute", "model.layers.1.self_attn": "selective", "model.layers.2": "remake"}
    return Plan.model_validate(
        {
            "choices": {LAYERS: "recompute"},
            "smaller_batches": [
                {"when": {"tokens": 32}, "choices": inside},
                {"when": {"tokens": 64}, "choices": {LAYERS: {"kind": "segment", "size": 3}}},
            ],
        }
    )


@pytest.mark.slow
def test_backwards_from_inside_the_model() -> None:
    """They do not pass the model's outputs, as where it returns none, or an object with tensors in it."""

    def inner(model: Any) -> dict[str, Any]:
        torch.manual_seed(1)
        held: list[Tensor] = []
        hook = model.model.layers[2].register_forward_hook(lambda m, a, out: held.append(out))
        for length in (64, 32, 16):
            model(**batch(length), use_cache=False)
        hook.remove()
        for out in held:
            out.float().pow(2).sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    wanted = inner(LLAMA.make())
    model = LLAMA.make()
    with apply(model, inside_or_whole(), sentinels="all"):
        assert_equal(inner(model), wanted)


def test_a_backward_after_removal_attaches_nothing() -> None:
    wanted = gradients(LLAMA.make(), (64, 16), at_once=True)
    model = LLAMA.make()
    apply(model, sets(32, 128))
    torch.manual_seed(1)
    losses = [model(**batch(length), use_cache=False).loss for length in (64, 16)]
    remove(model)
    for loss in reversed(losses):
        loss.backward()
    assert_equal({n: p.grad for n, p in model.named_parameters()}, wanted)
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_threads_that_need_two_sets_take_turns() -> None:
    """Two backwards at once, as devices have a thread each: a unit that runs again sees its own set to its end."""
    model: Any = LLAMA.make().eval()
    parameters = list(model.parameters())

    def gradients_of(length: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(**batch(length), use_cache=False).loss, parameters)

    wanted = [gradients_of(length) for length in (64, 16)]
    reading, writing = os.pipe()  # objects would be restored, as all that a unit changes in its recomputation
    with apply(model, sets(32, 128, of=(RECOMPUTE, parse_choice("selective")))) as handle:
        acting: Any = handle._session

        def slow(module: nn.Module, *_: Any) -> None:
            if recomputing():
                before = acting.acting
                time.sleep(0.02)
                os.write(writing, bytes([acting.acting == before]))

        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(slow)
        losses = [model(**batch(length), use_cache=False).loss for length in (64, 16)]
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(lambda loss: torch.autograd.grad(loss, parameters), losses))
        assert os.read(reading, 100) == b"\1" * 6
        os.close(reading)
        os.close(writing)
    for one, two in zip(found, wanted, strict=True):
        assert all(map(torch.equal, one, two))


def test_what_cannot_be_attached_leaves_the_model_as_it_was() -> None:
    model = LLAMA.make()
    wrong = Plan.model_validate(
        {"choices": {"**": "save"}, "smaller_batches": [{"when": {"tokens": 6}, "choices": {"no.such": "save"}}]}
    )
    with raises(PlanError, "no.such"):
        apply(model, wrong)
    assert not any("forward" in m.__dict__ for m in model.modules())
    with apply(model, sets(16, 64)), raises(ConflictError):
        apply(model, sets(16, 64))


def test_a_set_that_cannot_be_reattached_is_an_error_in_each_forward() -> None:
    model = LLAMA.make()
    with apply(model, sets(16, 64)):
        model.model.layers[0].forward = partial(model.model.layers[0].forward)
        for _ in range(2):
            with raises(ConflictError, "model.layers.0"):
                model(**batch(8))


@pytest.mark.slow
def test_layers_that_are_compiled_in_place() -> None:
    lengths = (8, 64, 8, 64)
    wanted = gradients(LLAMA.make().eval(), lengths)
    model: Any = LLAMA.make().eval()
    with apply(model, sets(16, 128, of=(SAVE, RECOMPUTE))) as handle:
        for layer in model.model.layers:
            layer.compile(backend="eager")
        assert_equal(gradients(model, lengths), wanted)
        assert used(handle) == {0: 2, 1: 2}


def _agree(rank: int) -> list[str]:
    """Ranks with batches of different lengths: sharded weights make them go by one set, DDP lets each choose."""
    from torch.distributed.fsdp import fully_shard

    wrong = []
    lengths = ((8, 64, 8), (8, 8, 8))[rank]
    for way in ("ddp", "fsdp2"):
        model: Any = LLAMA.make().eval()
        inner = model
        if way == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        handle = apply(inner, sets(16, 128))
        for length in lengths:
            given = batch(length)
            with torch.device("meta"):  # where tensors are made by default is not where ranks meet
                model(**given, use_cache=False).loss.backward()
        counted = {"fsdp2": {0: 2, 1: 1}, "ddp": {0: 2, 1: 1} if rank == 0 else {0: 3}}[way]
        if used(handle) != counted:
            wrong.append(f"{way}: {used(handle)}, expected {counted}")
    return wrong


@pytest.mark.slow
@needs_gloo
def test_ranks_agree_where_weights_are_sharded(tmp_path: Path) -> None:
    assert not on_ranks(_agree, tmp_path)
