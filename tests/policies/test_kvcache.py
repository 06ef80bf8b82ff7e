from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    FlaubertConfig,
    FlaubertWithLMHeadModel,
    StaticCache,
    XLMConfig,
    XLMWithLMHeadModel,
)

from autockpt.errors import ConflictError
from autockpt.policies.kvcache import with_caches, without_cache
from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, choice_kinds, parse_choice
from tests.policies.zoo import CASES, assert_equal


class Layer(nn.Module):
    def __init__(self, layer_idx: int | None = None, called: str = "layer_idx") -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        if layer_idx is not None:
            setattr(self.attention, called, layer_idx)

    def forward(self, hidden, layer_past=None, pair=None, past_key_values=None, use_cache=False): ...


def filled(layer: int = 0) -> DynamicCache:
    cache = DynamicCache()
    for i in range(layer + 1):
        cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), i)
    return cache


HIDDEN = torch.ones(1, 3, 2)


def test_empty_caches_are_taken_out_wherever_they_are():
    layer = Layer(0)
    for cache in (StaticCache(_config(), 8), ()):
        args, kwargs = without_cache(layer, "unit", (HIDDEN, cache), {"past_key_values": cache, "use_cache": True})
        assert args == (HIDDEN, None)
        assert kwargs == {"past_key_values": None, "use_cache": False}


@pytest.mark.parametrize("make", [DynamicCache, lambda: EncoderDecoderCache(DynamicCache(), DynamicCache())])
def test_growing_caches_are_exchanged_for_a_new_empty_one_at_every_run(make):
    given = make()
    taken = without_cache(Layer(0), "unit", (HIDDEN, given), {"past_key_values": given, "use_cache": True})
    assert taken[1]["use_cache"] is False
    for _ in range(2):
        args, kwargs = with_caches(*taken)
        for cache in (args[1], kwargs["past_key_values"]):
            assert type(cache) is type(given) and cache.get_seq_length() == 0
            grown = getattr(cache, "self_attention_cache", cache)
            keys, values = grown.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
            assert keys.shape == values.shape == (1, 1, 3, 2)
            if cache is not grown:
                cache.is_updated[0] = True
    assert given.get_seq_length() == 0 and not getattr(given, "is_updated", {}).get(0)


def _config():
    return CASES["llama"].make().config


def test_everything_else_stays_the_same_object():
    layer = Layer(0)
    pair = (HIDDEN, HIDDEN)
    args, kwargs = (HIDDEN, None, pair), {"past_key_values": None, "use_cache": False, "other": [1]}
    new_args, new_kwargs = without_cache(layer, "unit", args, kwargs)
    assert all(a is b for a, b in zip(new_args, args, strict=True))
    assert new_kwargs is kwargs


def test_a_filled_cache_is_refused_by_the_units_name():
    for cache in (
        filled(),
        EncoderDecoderCache(filled(), DynamicCache()),
        EncoderDecoderCache(DynamicCache(), filled()),
    ):
        with pytest.raises(ConflictError, match=r"model\.layers\.0 was called with a KV cache"):
            without_cache(Layer(0), "model.layers.0", (HIDDEN,), {"past_key_values": cache})
        with pytest.raises(ConflictError, match="KV cache"):
            without_cache(Layer(0), "unit", (HIDDEN, cache), {})
    with pytest.raises(ConflictError, match="KV cache"):
        without_cache(Layer(0), "unit", (HIDDEN, (HIDDEN, HIDDEN)), {})
    with pytest.raises(ConflictError, match="KV cache"):
        without_cache(Layer(0), "unit", (HIDDEN,), {"past_key_values": (HIDDEN, HIDDEN)})


def test_caches_of_a_models_own_count_by_what_they_hold():
    def left(layers: object) -> object:
        cache = SimpleNamespace() if layers is None else SimpleNamespace(layers=layers)
        return without_cache(Layer(0), "unit", (HIDDEN,), {"cache_params": cache})[1]["cache_params"]

    assert left([(torch.empty(0), torch.empty(0))]) is None
    assert left([SimpleNamespace(states=torch.empty(0))]) is None
    for layers in ([(HIDDEN, HIDDEN)], [SimpleNamespace(states=HIDDEN)], None):  # of the last nobody can tell
        with pytest.raises(ConflictError, match="KV cache"):
            left(layers)


def test_only_this_layers_part_of_a_cache_counts():
    cache = filled(0)
    for layer in (Layer(1), Layer(1, "layer_id")):
        _, kwargs = with_caches(*without_cache(layer, "unit", (HIDDEN,), {"past_key_values": cache}))
        assert kwargs["past_key_values"].get_seq_length(1) == 0
    with pytest.raises(ConflictError):
        without_cache(Layer(None), "unit", (HIDDEN,), {"past_key_values": cache})


def test_a_recurrent_layers_states_count():
    from transformers.cache_utils import LinearAttentionLayer

    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer()]
    assert without_cache(Layer(0), "unit", (HIDDEN,), {"cache_params": cache})[1] == {"cache_params": None}
    cache.layers[0].update_conv_state(torch.ones(1, 4, 3))
    with pytest.raises(ConflictError):
        without_cache(Layer(0), "unit", (HIDDEN,), {"cache_params": cache})


def test_layers_that_only_read_the_cache_keep_it():
    class Reader(Layer):
        _can_checkpoint_with_cache = True

    cache = filled()
    assert without_cache(Reader(0), "unit", (HIDDEN, cache), {"use_cache": True}) == (
        (HIDDEN, cache),
        {"use_cache": True},
    )


@pytest.mark.parametrize("choice", [RECOMPUTE, OFFLOAD], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_model_with_a_filled_cache(name, choice):
    case = CASES[name]
    model = case.make()
    ids = case.batch()["input_ids"][:, :8]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    with attach(model, case.choices(model, choice)), pytest.raises(ConflictError, match="KV cache"):
        model(input_ids=ids, past_key_values=cache)


@pytest.mark.parametrize("choice", [RECOMPUTE, OFFLOAD], ids=str)
def test_prefix_tuning_is_refused(choice):
    peft = pytest.importorskip("peft")
    case = CASES["llama"]
    model = peft.get_peft_model(case.make(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with attach(model, case.choices(model, choice)), pytest.raises(ConflictError, match="KV cache"):
        model(**case.batch())


@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
@pytest.mark.parametrize("family", [(XLMConfig, XLMWithLMHeadModel), (FlaubertConfig, FlaubertWithLMHeadModel)])
def test_models_that_cannot_switch_their_cache_off(family, kind):
    """One attention saves and fills the cache, the others must not find that; the bits are those of plain training."""

    def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        ids = torch.randint(5, 60, (2, 9))
        model(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def make() -> nn.Module:
        torch.manual_seed(0)
        config = family[0](vocab_size=64, emb_dim=16, n_layers=3, n_heads=2, max_position_embeddings=32, n_langs=1)
        return family[1](config).train()

    wanted, model = gradients(make()), make()
    with attach(model, {f"transformer.attentions.{i}": parse_choice(kind) for i in (1, 2)}):
        assert_equal(gradients(model), wanted)
