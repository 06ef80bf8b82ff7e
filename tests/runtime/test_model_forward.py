import copy
import pickle

import pytest
import torch
from torch import nn

from autockpt.errors import ConflictError
from autockpt.runtime import attach, without_kv_cache
from autockpt.schema.choices import RECOMPUTE, SAVE
from tests.errors import raises
from tests.policies.zoo import CASES, assert_equal, plain, train

LLAMA = CASES["llama"]


def applied(choice=RECOMPUTE):
    model = LLAMA.make()
    return model, attach(model, dict.fromkeys([f"model.layers.{i}" for i in range(3)], choice))


@pytest.mark.parametrize("enable", ["gradient_checkpointing_enable", "activation_checkpointing_enable"])
def test_a_trainers_switch_set_later_is_an_error(enable):
    model = LLAMA.make()
    attach(model, {"model.layers.0": RECOMPUTE, "model.layers.1": SAVE})
    if not hasattr(model, enable):
        pytest.skip(f"this transformers has no {enable}")
    twin = copy.deepcopy(model)
    getattr(model, enable)()
    with raises(ConflictError, "checkpointing=True") as caught:
        model(**LLAMA.batch())
    assert "Switch one off" in caught.value.remedy
    with torch.no_grad():
        model(**LLAMA.batch())
    twin(**LLAMA.batch()).loss.backward()
    getattr(twin, enable)()
    with pytest.raises(ConflictError):
        twin(**LLAMA.batch())


def test_a_switch_of_a_model_that_loops_itself():
    class Looping(nn.Sequential):
        grad_checkpointing = False

    model = Looping(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    with attach(model, {"0": RECOMPUTE, "1": SAVE}):
        model(torch.ones(1, 4))
        model.grad_checkpointing = True
        with raises(ConflictError, "Looping", "grad_checkpointing=True"):
            model(torch.ones(1, 4))


def kept_no_cache(output):
    """Nor does the tuple have a place for one; whoever uses it is told."""
    assert "past_key_values" not in output and len(output.to_tuple()) == 1
    cache = output.past_key_values
    with raises(ConflictError, "KV cache"):
        cache.get_seq_length()
    for use in (len, iter, lambda c: c[0], lambda c: LLAMA.make()(LLAMA.batch()["input_ids"], None, None, c)):
        with raises(ConflictError, "KV cache"):
            use(cache)
    assert not hasattr(pickle.loads(pickle.dumps(copy.deepcopy(cache))), "layers")
    return True


@pytest.mark.slow
def test_the_cache_is_off_however_it_is_asked_for():
    model, session = applied()
    ids = LLAMA.batch()["input_ids"]
    with session:
        assert kept_no_cache(model(ids)) and kept_no_cache(model.model(ids))
        assert model(ids, None, None, None, None, None, False).past_key_values is None
        assert kept_no_cache(model(ids, use_cache=True))
        with torch.no_grad():
            assert model(ids).past_key_values.get_seq_length() == ids.shape[1]
            model.generate(ids[:1], max_new_tokens=2, do_sample=False)
        assert model.config.use_cache is True
    assert model(ids).past_key_values.get_seq_length() == ids.shape[1]


def test_without_kv_cache_is_plain_training():
    model = LLAMA.make()
    with without_kv_cache(model) as session:
        assert_equal(train(model, LLAMA), plain(LLAMA))
        assert session.attached == {}
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_packed_sequences_without_a_mask_are_refused():
    model, ids = LLAMA.make(), LLAMA.batch()["input_ids"]
    packed = torch.arange(ids.shape[1]).remainder(ids.shape[1] // 2).expand_as(ids)

    def loss(**more):
        torch.manual_seed(0)
        return model(input_ids=ids, labels=ids, **more).loss

    apart = loss(position_ids=packed, use_cache=False)
    assert loss(position_ids=packed) != apart
    with attach(model, LLAMA.choices(model, RECOMPUTE)):
        with raises(ConflictError, "use_cache"):
            loss(position_ids=packed)
        assert loss(position_ids=packed, use_cache=False) == apart
        for taken in ({"attention_mask": torch.ones_like(ids)}, {"position_ids": torch.arange(ids.shape[1])[None]}):
            loss(**taken)
        with torch.no_grad():
            loss(position_ids=packed)
