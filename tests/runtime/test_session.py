import copy
import functools
import inspect

import pytest
import torch
from torch import nn

from autockpt.errors import ConflictError
from autockpt.policies.base import attached_to
from autockpt.runtime import apply, attach, remove
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE
from autockpt.schema.plan import Plan
from tests.errors import raises
from tests.policies.zoo import CASES, Row, Unit, assert_equal, plain, train

LLAMA = CASES["llama"]


def layers(n: int = 3) -> list[str]:
    return [f"model.layers.{i}" for i in range(n)]


def test_it_says_what_was_attached_and_takes_it_off():
    model = LLAMA.make()
    session = attach(model, dict(zip(layers(), (OFFLOAD, SAVE, RECOMPUTE), strict=True)))
    assert list(session.attached) == layers(), "by layer, not by kind of choice"
    assert [session.attached[n].split(":")[0] for n in layers()] == ["offload", "save", "recompute"]
    assert attached_to(model.model.layers[1]) is None
    assert attached_to(model.model.layers[2]) is not None
    session.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())
    with attach(model, dict.fromkeys(layers(), SAVE)):  # nothing at all
        assert not any("forward" in m.__dict__ for m in model.modules())


def test_twice_is_a_conflict_and_leaves_the_first_in_place():
    model = LLAMA.make()
    first = attach(model, {layers()[0]: RECOMPUTE})
    with raises(ConflictError):
        attach(model, {layers()[1]: OFFLOAD})
    assert attached_to(model.model.layers[0]) is not None
    assert attached_to(model.model.layers[1]) is None
    twin = copy.deepcopy(model)
    with pytest.raises(ConflictError) as caught:
        attach(twin, {layers()[1]: OFFLOAD})
    assert "autockpt.runtime.remove(model)" in caught.value.remedy
    first.remove()
    remove(twin)
    remove(twin)
    for each in (model, twin):
        with attach(each, {layers()[1]: OFFLOAD}):
            pass


def test_what_was_removed_is_reattached_by_the_same_objects():
    model = LLAMA.make()
    session = attach(model, {layers()[0]: RECOMPUTE, layers()[1]: OFFLOAD})
    forwards = {path: m.__dict__["forward"] for path, m in model.named_modules() if "forward" in m.__dict__}
    session.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())
    with attach(model, {layers()[2]: RECOMPUTE}), raises(ConflictError):
        session.reattach()
    assert not any("forward" in m.__dict__ for m in model.modules())
    session.reattach()
    assert {p: m.__dict__["forward"] for p, m in model.named_modules() if "forward" in m.__dict__} == forwards
    assert_equal(train(model, LLAMA), plain(LLAMA))
    session.remove()
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_units_that_count_are_measured_in_mid_training():
    def body(unit, x):
        unit.count = getattr(unit, "count", 0) + 1
        return unit.linear(x).sigmoid() * unit.count

    with attach(model := Row(lambda: Unit(body)), {"units.0": RECOMPUTE, "units.1": RECOMPUTE}) as session:
        session.sentinels.in_mid_training = True
        for step in range(1, 4):
            model(torch.randn(4, 8)).sum().backward()
            assert [unit.count for unit in model.units] == [step, step]


def test_nothing_is_left_when_attaching_fails(monkeypatch):
    from autockpt.policies import POLICIES

    def fail(unit, session):
        raise ConflictError("no")

    monkeypatch.setitem(POLICIES, "offload", fail)
    model = LLAMA.make()
    with raises(ConflictError):
        attach(model, dict(zip(layers(), (RECOMPUTE, OFFLOAD, RECOMPUTE), strict=True)))
    assert not any("forward" in m.__dict__ for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("choice", [RECOMPUTE, OFFLOAD], ids=str)
def test_a_forward_wrapped_afterwards_becomes_plain(choice):
    model = LLAMA.make()
    session = attach(model, dict.fromkeys(layers(), choice))
    layer = model.model.layers[1]
    ours = layer.forward

    @functools.wraps(ours)
    def outer(*args, **kwargs):
        return ours(*args, **kwargs)

    layer.forward = outer
    with pytest.raises(ConflictError):
        attach(model, {layers()[1]: choice})
    session.remove()
    assert layer.forward is outer
    assert attached_to(layer) is None
    assert_equal(train(model, LLAMA, use_cache=False), plain(LLAMA))
    model = LLAMA.make()
    with attach(model, dict.fromkeys(layers(), choice)):
        pass
    with attach(model, dict.fromkeys(layers(), choice)):
        assert_equal(train(model, LLAMA), plain(LLAMA))


@pytest.mark.parametrize("name", CASES)
def test_signatures_stay_readable(name):
    case = CASES[name]
    model = case.make()
    before = {n: inspect.signature(m.forward) for n, m in model.named_modules()}
    with attach(model, case.choices(model, RECOMPUTE)):
        assert {n: inspect.signature(m.forward) for n, m in model.named_modules()} == before


def test_other_checkpointing_in_the_model_is_refused():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = LLAMA.make()
    model.model.layers[0].gradient_checkpointing = True
    for choices in ({}, dict.fromkeys(layers(), SAVE)):
        with raises(ConflictError, "model.layers.0", "gradient_checkpointing=True"):
            attach(model, choices)
    model = LLAMA.make()
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    with raises(ConflictError, "CheckpointWrapper"):
        attach(model, {"model.layers.1": RECOMPUTE})


def test_lazy_modules_are_to_have_run_before() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(8), nn.ReLU()) for _ in range(2)))
    with raises(ConflictError, "0.0.weight"):
        attach(model, {"0": RECOMPUTE})
    with raises(ConflictError, "0.0.weight"):
        apply(model, Plan(choices={"0": RECOMPUTE}))
    model(torch.ones(2, 8))
    attach(model, {"0": RECOMPUTE})
    model(torch.ones(2, 8)).sum().backward()
