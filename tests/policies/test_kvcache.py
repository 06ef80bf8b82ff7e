from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from autockpt.errors import ConflictError
from autockpt.policies.kvcache import without_cache
from autockpt.runtime import attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE
from tests.policies.zoo import CASES


class Layer(nn.Module):
    def __init__(self, layer_idx: int | None = None) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        if layer_idx is not None:
            self.attention.layer_idx = layer_idx

    def forward(self, hidden, layer_past=None, pair=None, past_key_values=None, use_cache=False): ...


def filled(layer: int = 0) -> DynamicCache:
    cache = DynamicCache()
    for i in range(layer + 1):
        cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), i)
    return cache


HIDDEN = torch.ones(1, 3, 2)


def test_empty_caches_are_taken_out_wherever_they_are():
    layer = Layer(0)
    for cache in (DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache()), StaticCache(_config(), 8)):
        args, kwargs = without_cache(layer, "unit", (HIDDEN, cache), {"past_key_values": cache, "use_cache": True})
        assert args == (HIDDEN, None)
        assert kwargs == {"past_key_values": None, "use_cache": False}
    args, kwargs = without_cache(layer, "unit", (HIDDEN, ()), {"past_key_values": ()})
    assert args == (HIDDEN, None)
    assert kwargs == {"past_key_values": None}


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


def test_only_this_layers_part_of_a_cache_counts():
    cache = filled(0)
    assert without_cache(Layer(1), "unit", (HIDDEN,), {"past_key_values": cache})[1] == {"past_key_values": None}
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
