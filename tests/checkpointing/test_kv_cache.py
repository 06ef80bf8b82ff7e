import functools
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    XLMConfig,
    XLMWithLMHeadModel,
)

from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.runtime.session import Session
from autockpt.schema.choices import parse_choice
from autockpt.workload.units import discover_units
from tests.errors import raises
from tests.policies.zoo import CASES, KINDS, assert_as_plain, assert_equal, in_turn, on


def mistral() -> nn.Module:
    torch.manual_seed(0)
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    return MistralForCausalLM(MistralConfig(**small, num_key_value_heads=2, sliding_window=6)).train()


MODELS = {"mistral": mistral, **{name: CASES[name].make for name in ("llama", "gpt2", "t5")}}
PARTS = ("model.layers.0", "model.layers.1")


def planned(model: nn.Module, kind: str | None) -> Session:
    units = [unit.name for unit in discover_units(model) if unit.role == "block"]
    return attach(model, dict.fromkeys(units, parse_choice(kind or "save")), sentinels="all")


def in_chunks(model: nn.Module, kind: str | None, cache: Any, **more: Any) -> dict[str, torch.Tensor]:
    """Loss and gradients where each of three chunks attends to those before."""
    ids = torch.arange(36).view(2, 18) % 50 + 1
    losses, encoded = [], None
    torch.manual_seed(1)
    with planned(model, kind):
        for part in ids.chunk(3, 1):
            given = {"input_ids": part}
            if model.config.is_encoder_decoder:
                given = {"encoder_outputs": encoded, "decoder_input_ids": part} | (
                    {} if encoded else {"input_ids": ids}
                )
            out = model(**given, past_key_values=cache, **more)
            losses.append(out.logits.float().pow(2).mean())
            cache = out.past_key_values
            encoded = (out.encoder_last_hidden_state,) if model.config.is_encoder_decoder else None
        loss = torch.stack(losses).sum()
        loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def cache_of(model: nn.Module) -> Any:
    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return DynamicCache(config=model.config) if isinstance(model, MistralForCausalLM) else DynamicCache()


@functools.cache
def in_chunks_plainly(name: str) -> dict[str, torch.Tensor]:
    wanted = in_chunks(model := MODELS[name](), None, cache_of(model))
    if name != "t5":
        assert not torch.equal(in_chunks(MODELS[name](), None, None, use_cache=False)["loss"], wanted["loss"])
    return wanted


@pytest.mark.slow
@in_turn(MODELS)
def test_training_in_chunks_with_a_cache_of_the_users(kind, case):
    model = MODELS[case]()
    assert_equal(in_chunks(model, kind, given := cache_of(model)), in_chunks_plainly(case))
    there = weakref.ref(given)
    del given
    assert there() is None  # the graph of a unit does not hold what holds that graph


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "save"])
@pytest.mark.parametrize("switched_on", [{}, {"use_cache": True}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_cache_that_was_not_kept_is_refused_where_it_is_used(name, switched_on, kind):
    with raises(ConflictError, "KV cache") as caught:
        in_chunks(MODELS[name](), kind, None, **switched_on)
    assert "past_key_values=DynamicCache()" in caught.value.remedy


class Block(nn.Module):
    """Whatever its cache is called, and however it knows its place in it."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.project = place, nn.Linear(8, 24)

    def forward(self, x, memory):
        q, k, v = (part[:, None] for part in self.project(x).chunk(3, -1))
        return x + nn.functional.scaled_dot_product_attention(q, *memory.update(k, v, self.place))[:, 0]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(i) for i in range(2))

    def forward(self, x, memory=None, use_cache=True):  # about which it does nothing
        memory = DynamicCache() if memory is None else memory
        for layer in self.layers:
            x = layer(x, memory)
        return x, memory


class Bank(nn.Module):
    """Whose ``use_cache`` means features of the last batch, and what it returns."""

    def __init__(self):
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), torch.zeros(8)

    def forward(self, x, use_cache=True):
        for layer in self.layers:
            x = layer(x + self.last).tanh()
        if use_cache:
            self.last = x.detach().mean((0, 1))
        return (x, self.last) if use_cache else x


class Answer(nn.Module):
    """What a model gives of a sequence, part by part; ``memory`` makes what the parts share."""

    def __init__(self, model: nn.Module, memory: Any = None) -> None:
        super().__init__()
        self.model, self.memory = model, memory

    def forward(self, x):
        if self.memory is None:
            return self.model(x)[0]
        outs, memory = [], self.memory()
        for part in x.chunk(2, 1):
            out, memory = self.model(part, memory)
            outs.append(out)
        return torch.cat(outs)


@pytest.mark.parametrize("kind", ["recompute", "offload"])
def test_a_models_own_use_cache_is_left_to_it(kind):
    assert_as_plain(lambda: Answer(Bank()), on(PARTS, kind), lambda: torch.randn(2, 4, 8), 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [DynamicCache, lambda: None], ids=["theirs", "the model's"])
def test_chunks_of_a_model_of_the_users_own(make, kind):
    batch = lambda: torch.randn(2, 16, 8)  # noqa: E731
    assert_as_plain(lambda: Answer(Blocks(), make), on(PARTS, kind), batch, 1, sentinels="all")


def test_a_cache_that_cannot_be_restored_is_refused_at_the_call():
    class Mine(DynamicCache):
        pass

    model, ids = CASES["llama"].make(), torch.ones(1, 4, dtype=torch.long)
    offloading = DynamicCache()
    offloading.offloading = True  # made so, it asks for a stream, which PyTorch built for CUDA has only on a GPU
    with planned(model, "recompute"):
        for cache in (Mine(), StaticCache(model.config, 8), offloading):
            with raises(ConflictError, "layers.0", type(cache).__name__):
                model(ids, past_key_values=cache)
            with torch.no_grad():
                model(ids, past_key_values=Mine())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prefix_tuning(kind):
    peft = pytest.importorskip("peft")
    case = CASES["llama"]

    def gradients(choice):
        torch.manual_seed(0)
        prefixes = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        model = peft.get_peft_model(case.make(), prefixes)
        with planned(model, choice):
            model(**case.batch()).loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    assert_equal(gradients(kind), gradients(None))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_cannot_switch_their_cache_off(kind):
    """One attention saves and fills the cache, the others must not find that; the bits are those of plain training."""

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        ids = torch.randint(5, 60, (2, 9))
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = XLMConfig(vocab_size=64, emb_dim=16, n_layers=3, n_heads=2, max_position_embeddings=32, n_langs=1)
        return XLMWithLMHeadModel(config).train()

    wanted, model = gradients(make()), make()
    with attach(model, {f"transformer.attentions.{i}": parse_choice(kind) for i in (1, 2)}):
        assert_equal(gradients(model), wanted)
