from __future__ import annotations

from functools import partial

import pytest
from torch.utils.checkpoint import checkpoint

from autockpt.policies import POLICIES
from autockpt.runtime import RunCounter, attach
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, Choice, choice_kinds, parse_choice
from tests.policies.zoo import CASES, Case


def count(case: Case, choices: dict[str, Choice], attached: dict[str, Choice] | None = None):
    model = case.make()
    counter = RunCounter(model, choices)
    with attach(model, choices if attached is None else attached, transport=counter.transports()):
        extra = {"use_cache": False} if case.takes_cache else {}
        with counter.counting():
            case.step(model, case.batch(), **extra).backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return counter.result()


@pytest.mark.parametrize("kind", sorted(choice_kinds("block")))
@pytest.mark.parametrize("name", CASES)
def test_every_policy_does_what_it_says(name, kind):
    case = CASES[name]
    choice = parse_choice(kind)
    runs = count(case, case.choices(case.make(), choice))
    for unit in runs.values():
        least, most = POLICIES[kind].reruns(choice, unit.forward)
        assert unit.trains
        assert unit.forward > 0
        assert least <= unit.again <= most
        assert (unit.moved_bytes > 0) == ("offload" in kind)


def test_llama_runs_all_but_its_last_product_again():
    names = [f"model.layers.{i}" for i in range(3)]
    runs = count(CASES["llama"], dict(zip(names, (RECOMPUTE, SAVE, OFFLOAD), strict=True)))
    assert [runs[n].forward for n in names] == [9, 9, 9]  # dropout splits its attention into two products
    assert [runs[n].again for n in names] == [8, 0, 0]


def test_a_choice_that_is_silently_ignored_is_seen():
    planned = {f"model.layers.{i}": RECOMPUTE for i in range(3)}
    runs = count(CASES["llama"], planned, attached={"model.layers.0": RECOMPUTE})
    assert runs["model.layers.0"].again == 8
    assert runs["model.layers.1"].again == 0
    least, _ = POLICIES["recompute"].reruns(RECOMPUTE, 8)
    assert least > 0


def test_checkpointing_that_nobody_planned_is_seen():
    case = CASES["llama"]
    model = case.make()
    model.model.layers[1].gradient_checkpointing = True
    model.model.layers[1]._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    counter = RunCounter(model, {f"model.layers.{i}": SAVE for i in range(3)})
    with counter.counting():
        case.step(model, case.batch(), use_cache=False).backward()
    assert [r.again for r in counter.result().values()] == [0, 8, 0]


def test_sub_units_count_for_themselves():
    choices = {"model.layers.0": SAVE, "model.layers.0.mlp": RECOMPUTE}
    runs = count(CASES["llama"], choices)
    assert (runs["model.layers.0"].forward, runs["model.layers.0"].again) == (6, 0)
    assert runs["model.layers.0.mlp"].forward == 3
    assert runs["model.layers.0.mlp"].again >= 2
