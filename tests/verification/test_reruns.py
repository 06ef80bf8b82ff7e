from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autockpt.analysis.verify import judge_runs
from autockpt.policies import POLICIES
from autockpt.runtime import attach
from autockpt.schema.choices import RECOMPUTE, SAVE, Choice, Selective, choice_kinds, parse_choice
from autockpt.verification import RunCounter
from tests.policies.zoo import CASES, Case


def count(case: Case, choices: dict[str, Choice], attached: dict[str, Choice] | None = None):
    model = case.make()
    counter = RunCounter(model, choices)
    with attach(model, choices if attached is None else attached) as session:
        extra = {"use_cache": False} if case.takes_cache else {}
        with counter.counting():
            case.step(model, case.batch(), **extra).backward()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert (session.host_bytes > 0) == any("offload" in choice.kind for choice in choices.values())
    return counter.result()


@pytest.mark.slow
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
        assert unit.named_again <= unit.changed
        # compile_budget: uncompiled, as here, it saves everything and says so
        assert unit.ops_again > 0 or kind in ("save", "offload", "compile_budget")


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


KEPT = Selective(keep=("mlp.up_proj", "self_attn.q_proj"))


def test_kept_products_are_counted_apart_and_not_rerun():
    (unit,) = count(CASES["llama"], {"model.layers.1": KEPT}).values()
    assert (unit.forward, unit.named, unit.named_again, unit.changed) == (9, 2, 0, 0)
    assert unit.again == 6  # nor the last product of all
    assert "2 of 2 outputs that are to be kept" in judge_runs({"model.layers.1": KEPT}, {"model.layers.1": unit}).detail


@pytest.mark.parametrize("instead", [RECOMPUTE, SAVE, Selective(keep=("mlp.up_proj",))], ids=str)
def test_a_selective_that_does_not_keep_what_it_names_is_seen(instead):
    runs = count(CASES["llama"], {"model.layers.1": KEPT}, attached={"model.layers.1": instead})
    assert judge_runs({"model.layers.1": KEPT}, runs).state == "failed"


class Changing(nn.Module):
    """A model whose layer changes the output of a product in place, so that it cannot be kept."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(self.first(x).mul_(2).tanh())

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_an_output_that_was_changed_in_place_is_excused():
    model, choices = Changing(), {"layers.0": Selective(keep=("first",))}
    counter = RunCounter(model, choices)
    with attach(model, choices), counter.counting():
        model(torch.randn(4, 32)).sum().backward()
    (unit,) = counter.result().values()
    assert (unit.named, unit.named_again, unit.changed) == (1, 1, 1)
    assert judge_runs(choices, counter.result()).state == "passed"
