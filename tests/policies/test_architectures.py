"""Every policy on models of every build, in every precision, with and without dropout: equal bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from autockpt.runtime import attach, without_kv_cache
from autockpt.schema.choices import choice_kinds, parse_choice
from autockpt.workload.units import discover_units
from tests.device import DEVICE, random_state
from tests.policies.architectures import ARCHITECTURES, Architecture
from tests.policies.zoo import assert_equal

pytestmark = pytest.mark.slow

SETTINGS = [(precision, dropout) for dropout in (0.0, 0.2) for precision in ("fp32", "bf16", "autocast")]
KINDS = sorted(choice_kinds("block"))
STEPS = 5  # calls that go by what earlier ones taught are among them


def autocast(precision: str) -> AbstractContextManager:
    return torch.autocast(DEVICE.type, dtype=torch.bfloat16) if precision == "autocast" else nullcontext()


def train(architecture: Architecture, model: nn.Module, precision: str) -> dict[str, Tensor]:
    """Losses, gradients, buffers and random states of some steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = architecture.batch()
    seen: dict[str, Tensor] = {}
    for i in range(STEPS):
        with autocast(precision):
            loss = architecture.step(model, batch)
        loss.backward()
        seen[f"{i} loss"], seen[f"{i} random state"] = loss.detach().clone(), random_state()
        seen |= {f"{i} gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        seen |= {f"{i} buffer {n}": b.clone() for n, b in model.named_buffers()}
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.fixture(scope="module", params=ARCHITECTURES.values(), ids=str)
def trained(request) -> Iterator[tuple[Architecture, dict]]:
    """An architecture, and per precision and dropout its model with what plain training makes of it."""
    found = {}
    for precision, dropout in SETTINGS:
        model = request.param.build(dropout)
        if precision == "bf16":
            model = model.bfloat16()
        twin = copy.deepcopy(model)
        with without_kv_cache(twin):
            found[precision, dropout] = model, train(request.param, twin, precision)
    yield request.param, found


def is_bit_equal(architecture: Architecture, cases: dict, kind: str, precision: str, dropout: float) -> None:
    model, wanted = cases[precision, dropout]
    twin = copy.deepcopy(model)
    choices = {u.name: parse_choice(kind) for u in discover_units(twin) if u.role == "block"}
    assert len(choices) >= 2
    with attach(twin, choices) as session, without_kv_cache(twin) if session.guard is None else nullcontext():
        assert_equal(train(architecture, twin, precision), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal_everywhere(trained, kind):
    """Each kind on every architecture, and both with every setting: not each with each of the others."""
    architecture, cases = trained
    turn = KINDS.index(kind) + list(ARCHITECTURES.values()).index(architecture)
    is_bit_equal(architecture, cases, kind, *SETTINGS[turn % len(SETTINGS)])
