"""The user's own function: what it may return, and how its failures are told."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt.errors import AutockptError, WorkloadError
from autockpt.schema.workload import WorkloadSpec
from autockpt.workload import Step, build

CODE = """
import torch
from torch import nn
from autockpt.workload import Step

def net():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

def loss(model, batch):
    return model(batch["x"]).mean()

def three():
    return net(), {"x": torch.ones(2, 4)}, loss

def two():
    from transformers import LlamaConfig, LlamaForCausalLM
    c = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=20)
    ids = torch.ones(2, 4, dtype=torch.long)
    return LlamaForCausalLM(c), {"input_ids": ids, "labels": ids}

def optimized():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    return Step(model, {"x": torch.ones(2, 4)}, loss=loss, optimizer=optimizer, accumulate=3)

def whole():
    model, batch, loss = three()
    return Step(model, batch, loss=loss, accumulate=2)

def loop():
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    def full_step():
        loss(model, {"x": torch.ones(2, 4)}).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Step(model, None, full_step=full_step, snapshot=(optimizer,))

def options(batch_size=2, *, seq_len=3, seed=None):
    return net(), {"x": torch.full((batch_size, seq_len, 4), float(seed))}, loss

def everything(**options):
    return net(), {"x": torch.ones(options["batch_size"], 4)}, loss

class Maker:
    make = staticmethod(three)

def broken():
    return helper(torch.ones(3))

def helper(x):
    return x @ torch.ones(4)

def leaves():
    raise SystemExit(3)

def four(): return 1, 2, 3, 4
def nothing(): return None
def number(): return 1, {}
def no_step(): return net(), torch.ones(2, 4)
def frozen(): return net().requires_grad_(False), {"x": torch.ones(2, 4)}, loss
def memory(): raise MemoryError
value = 5
"""


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "imports_nothing.py").write_text("\nimport no_such_package\n")
    (tmp_path / "does_not_parse.py").write_text("def f(:\n")
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("mine", "imports_nothing", "does_not_parse"):
            del sys.modules[name]


def make(function: str, **options: Any) -> Step:
    return build(WorkloadSpec(model=function if ":" in function else f"mine:{function}", **options))


@pytest.mark.parametrize("function", ["three", "two", "optimized", "loop", "whole", "Maker.make"])
def test_everything_that_may_be_returned_trains(function: str) -> None:
    w = make(function)
    before = [p.detach().clone() for p in w.model.parameters()]
    w.cycle()
    if w.optimizer is not None:
        assert any(not torch.equal(a, b) for a, b in zip(before, w.model.parameters(), strict=True))
    assert w.spec is not None and w.settings["params"] > 0 and w.settings["model"] in w.spec.model


def test_what_the_function_made_comes_before_the_spec() -> None:
    w = make("optimized")
    assert type(w.optimizer) is torch.optim.SGD and w.accumulate == 3
    w = make("three", optimizer="sgd", accumulate=2)
    assert type(w.optimizer) is torch.optim.SGD and w.accumulate == 2
    assert make("whole").accumulate == 2


def test_options_reach_the_parameters_of_their_names() -> None:
    assert make("options", batch_size=5, seed=7).batch["x"].shape == (5, 3, 4)
    assert make("options", seed=7).batch["x"].max() == 7
    assert make("everything", batch_size=6).batch["x"].shape == (6, 4)
    with pytest.raises(WorkloadError):
        make("options", dtype="bf16")


@pytest.mark.parametrize(
    ("option", "value"), [("lora", 2), ("accumulate", 4), ("optimizer", "sgd"), ("autocast", "bf16"), ("liger", True)]
)
def test_options_that_a_step_has_decided_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(WorkloadError):
        make("whole", **{option: value})
    assert make("whole", units="0,2").units == "0,2"


FAILURES = """broken leaves four nothing number no_step frozen value thre nowhere.at.all:f
    nowhere.py:f imports_nothing:f does_not_parse:f"""


@pytest.mark.parametrize("function", FAILURES.split())
def test_failures_are_told_in_a_line(function: str) -> None:
    with pytest.raises(AutockptError) as caught:
        make(function)
    assert caught.value.exit_code == 2 and caught.value.remedy and len(str(caught.value).splitlines()) == 2
