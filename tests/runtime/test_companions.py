"""Libraries that touch a model's forward as well."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.policies.base import attached_to
from autockpt.runtime import attach, remove
from autockpt.schema.choices import OFFLOAD, RECOMPUTE, SAVE, choice_kinds, parse_choice
from tests.policies.zoo import CASES, assert_equal

pytestmark = pytest.mark.slow

LLAMA = CASES["llama"]
CHOICES = {"model.layers.0": RECOMPUTE, "model.layers.1": SAVE, "model.layers.2": OFFLOAD}


def accelerated(model: nn.Module) -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    return accelerator, accelerator.prepare(model)


def run(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(**LLAMA.batch(), use_cache=False).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("order", ["before", "after"])
def test_accelerate_prepares_unwraps_and_copies(order):
    accelerator, plainly = accelerated(LLAMA.make())
    wanted = run(plainly)
    in_full_precision = run(accelerator.unwrap_model(plainly, keep_fp32_wrapper=False))
    model = LLAMA.make()
    session = attach(model, CHOICES) if order == "before" else None
    accelerator, prepared = accelerated(model)
    session = session or attach(prepared, CHOICES)
    assert_equal(run(prepared), wanted)
    assert attached_to(prepared) is not None
    twin = copy.deepcopy(prepared)
    assert_equal(run(twin), wanted)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert float(twin(**LLAMA.batch()).loss) != float(prepared(**LLAMA.batch()).loss)
    assert_equal(run(prepared), wanted)
    remove(twin)
    assert not any(attached_to(m) for m in twin.modules())
    unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    # what was put on after accelerate's wrapper keeps that where it is
    assert_equal(run(unwrapped), wanted if order == "after" else in_full_precision)
    session.remove()
    assert not any(attached_to(m) for m in unwrapped.modules())
    run(unwrapped)


def test_a_scaled_loss_with_steps_that_are_skipped():
    """GradScaler: gradients scaled by thousands, one step with infinities skipped, clipping in between."""

    def train(choices: dict[str, Any]) -> dict[str, Tensor]:
        model = LLAMA.make()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        scales = []
        with attach(model, choices):
            for i in range(4):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(**LLAMA.batch(), use_cache=False).loss
                scaler.scale(loss * (float("inf") if i == 1 else 1.0)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
        assert min(scales) == 2.0**11 and max(scales) == 2.0**12  # backed off once, and grew again
        return {n: p.detach().clone() for n, p in model.named_parameters()}

    wanted = train({})
    for kind in sorted(choice_kinds("block")):
        assert_equal(train(dict.fromkeys(CHOICES, parse_choice(kind))), wanted)
