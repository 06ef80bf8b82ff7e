from __future__ import annotations

import functools
import random
import subprocess
import sys
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autockpt.policies.rerun_state import surroundings
from autockpt.policies.rerun_state.surroundings import (
    numpy_state,
    put_numpy,
    put_python,
    python_state,
    switched,
    switches,
)
from autockpt.runtime import attach
from autockpt.schema.choices import from_label

DRAWS = (random.random, lambda: random.gauss(0, 1), lambda: random.getrandbits(70), lambda: random.shuffle([1, 2, 3]))

NUMPY_DRAWS = (np.random.rand, np.random.randn, lambda: np.random.permutation(5), lambda: np.random.standard_normal(3))


@given(st.integers(0, 2**32), st.lists(st.sampled_from(DRAWS), max_size=8), st.integers(0, 700))
def test_pythons_state_is_what_getstate_says(seed, draws, more):
    """Any draw changes it, the left-over normal number included; putting it back repeats the numbers."""
    random.seed(seed)
    for _ in range(more):
        random.random()
    before = random.getstate()
    state = python_state()
    for draw in draws:
        was = python_state()
        draw()
        assert python_state() != was
    drawn = [random.random(), random.gauss(0, 1), random.gauss(0, 1)]
    put_python(state)
    assert random.getstate() == before and python_state() == state
    for draw in draws:
        draw()
    assert [random.random(), random.gauss(0, 1), random.gauss(0, 1)] == drawn


def test_without_the_quick_way_the_state_is_the_same(monkeypatch):
    random.seed(3)
    random.gauss(0, 1)
    quick = python_state()
    monkeypatch.setattr(surroundings, "_python_words", lambda: None)
    slow, drawn = python_state(), random.random()
    for state in (quick, slow):
        put_python(state)
        assert python_state() == slow and random.random() == drawn


@pytest.mark.parametrize("quick", [True, False])
@given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from(NUMPY_DRAWS), max_size=6), st.integers(0, 700))
def test_numpys_state_is_what_get_state_says(quick, seed, draws, more):
    found = surroundings._numpy_places if quick else lambda source: None
    with patch.object(surroundings, "_numpy_places", found):
        np.random.seed(seed)
        np.random.rand(more)
        before, state = np.random.get_state(), numpy_state()
        for draw in draws:
            was = numpy_state()
            draw()
            assert numpy_state() != was
        put_numpy(state)
        assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before, strict=True))
        assert numpy_state() == state


def test_numpys_state_is_found_where_it_lies():
    assert len(numpy_state()) == 2


@pytest.mark.parametrize(
    ("where", "name", "other"),
    [
        (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
        (torch.backends.cudnn.rnn, "fp32_precision", "ieee"),
        (torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
        (torch.backends.cuda.matmul, "allow_fp16_accumulation", True),
        (torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
        (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", (False, False)),
    ],
)
def test_how_precise_kernels_are_is_put_back(where, name, other):
    usual = getattr(where, name)
    before, said = switches(), other[0] if type(other) is tuple else other
    assert usual != said
    try:
        setattr(where, name, other)
        of_forward = switches()
        setattr(where, name, usual)
        with switched(of_forward):
            assert getattr(where, name) == said
        assert getattr(where, name) == usual and switches() == before
    finally:
        setattr(where, name, usual)


def test_whether_anomalies_are_looked_for_is_put_back():
    before = switches()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        of_forward = switches()
    with switched(of_forward):
        assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
    assert not torch.is_anomaly_enabled() and switches() == before


def _first_attention_puts_another_order(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As CUDA does on some cards, once in a process; the order that it puts."""
    before = torch._C._get_sdp_priority_order()
    other = [before[1], before[0], *before[2:]]
    monkeypatch.setattr(surroundings, "_cuda_is_initialized", lambda: True)
    once = functools.cache(lambda: torch._C._set_sdp_priority_order(other))
    monkeypatch.setattr(surroundings, "_settle_order_of_attentions", once)
    return other


def test_the_order_of_attentions_that_a_second_run_finds_is_the_one_that_the_first_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Attends(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            surroundings._settle_order_of_attentions()
            return (super().forward(x) * torch._C._get_sdp_priority_order()[0]).exp()

    model, x, before = nn.Sequential(Attends(4, 4)), torch.randn(2, 4), torch._C._get_sdp_priority_order()
    other = _first_attention_puts_another_order(monkeypatch)
    expected = (torch.nn.functional.linear(x, model[0].weight, model[0].bias) * other[0]).exp()  # type: ignore[arg-type]
    wanted = torch.autograd.grad(expected.square().sum(), model[0].weight)
    try:
        with attach(model, {"0": from_label("recompute")}, sentinels="off"):
            assert torch.equal(wanted[0], torch.autograd.grad(model(x).square().sum(), model[0].weight)[0])
    finally:
        torch._C._set_sdp_priority_order(before)
    assert before[0] != other[0]


_FIRST_OF_A_PROCESS = """
import torch, transformers
from autockpt.runtime import attach
from autockpt.schema.choices import from_label
torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
ids = torch.randint(0, 64, (2, 128), device="cuda")
with attach(model, dict.fromkeys(["model.layers.0", "model.layers.1"], from_label("recompute"))):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
found = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
assert all(map(torch.equal, found, (p.grad for p in model.parameters())))
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_whose_first_attention_is_in_a_planned_unit() -> None:
    subprocess.run([sys.executable, "-c", _FIRST_OF_A_PROCESS], check=True)
