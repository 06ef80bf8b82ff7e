"""Plans for compiled training on live models: applied before or after compiling, and where they do not belong."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt import Plan, apply
from autockpt.runtime.session import compiled_as
from autockpt.schema import Measurement
from autockpt.schema.choices import CompileBudget, parse_choice
from autockpt.workload import discover_units
from tests.measuring.small_workloads import Stack
from tests.policies.zoo import bytes_alive_after

pytestmark = pytest.mark.usefixtures("fresh_compiler")
CHEAP: dict[str, Any] = {"backend": "aot_eager_decomp_partition"}
NAMES = [f"layers.{i}" for i in range(4)]


def make() -> Stack:
    torch.manual_seed(0)
    return Stack(dropout=0.0)


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(256, 16, requires_grad=True)


def plan_for(model: nn.Module, mode: str | None, **more: Any) -> Plan:
    """A measured plan with a tight budget on every layer."""
    return Plan.create(
        dict.fromkeys(NAMES, CompileBudget(fraction=0.1)),
        discover_units(model),
        source="measured",
        compile=mode,
        measured=Measurement(peak_bytes=2**20, step_seconds=0.5),
        **more,
    )


def compile_in_place(model: nn.Module, mode: str) -> None:
    for module in model.layers if mode == "layers" else [model]:  # type: ignore[union-attr]
        module.compile(**CHEAP)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch()).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def kept(model: nn.Module) -> int:
    return bytes_alive_after(lambda: model(batch()))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["layers", "model"])
@pytest.mark.parametrize("first", ["apply", "compile"])
def test_a_plan_acts_whether_applied_before_or_after_compiling(mode: str, first: str):
    plain = make()
    compile_in_place(plain, mode)
    wanted, most = gradients(plain), kept(plain)
    torch._dynamo.reset()
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        if first == "compile":
            compile_in_place(model, mode)
        with apply(model, plan_for(model, mode)):
            if first == "apply":
                compile_in_place(model, mode)
            found = gradients(model)
            assert kept(model) < 0.7 * most
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_plan_for_other_steps_than_compiled_ones_is_doubted():
    model = make()
    compile_in_place(model, "layers")
    choices = dict.fromkeys(NAMES, parse_choice("recompute"))
    measured = Measurement(peak_bytes=2**20, step_seconds=0.5)
    plan = Plan.create(choices, discover_units(model), source="measured", measured=measured)
    with pytest.warns(UserWarning, match="the model is compiled"), apply(model, plan) as handle:
        assert any("compiled" in note for note in handle.notes)


def test_how_a_model_is_compiled_is_seen():
    model = make()
    assert compiled_as(model, NAMES) is None
    model.layers[2].compile(**CHEAP)
    assert compiled_as(model, NAMES) == "layers"
    assert compiled_as(torch.compile(make(), **CHEAP), NAMES) == "model"  # type: ignore[arg-type]
    wrapped = make()
    wrapped.layers[0] = torch.compile(wrapped.layers[0], **CHEAP)  # type: ignore[assignment]
    assert compiled_as(wrapped, NAMES) == "layers"
