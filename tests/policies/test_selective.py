"""What keeping some outputs of a unit that runs again can get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autockpt.checkpointing.op_table import is_heavy
from autockpt.errors import PlanError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, parse_choice
from tests.errors import raises
from tests.policies.zoo import CASES, assert_equal, bytes_alive_after, plain, train

Body = Callable[["Unit", Tensor], Tensor]


def selective(*keep: str, within: tuple[str, ...] = ()) -> Choice:
    return parse_choice({"kind": "selective", "keep": list(keep), "within": list(within)})


class Unit(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.body, self.step = body, 0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(Unit(body) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def mlp(unit: Unit, x: Tensor) -> Tensor:
    return x + unit.down(F.gelu(unit.up(x)))


class Executed(TorchDispatchMode):
    """How often heavy ops run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_heavy(func) and "backward" not in str(func):
            name = str(func.overloadpacket)
            self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def executed(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    with Executed() as mode:
        run()
    return mode.counts


def gradients(model: nn.Module, times: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 8).requires_grad_()
    loss = model(x).pow(2).sum()
    for _ in range(times - 1):
        loss.backward(retain_graph=True)
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    assert x.grad is not None
    return found | {"x": x.grad}


@pytest.mark.parametrize(("keep", "forwards"), [("up", 2), ("down", 4), ("**", 2)])
def test_what_is_kept_is_not_executed_again(keep, forwards):
    """Two units of two products: those of ``up`` run once, and ``down`` is never needed again."""
    wanted = gradients(Model(mlp))
    model = Model(mlp)
    with attach(model, dict.fromkeys(("units.0", "units.1"), selective(keep))):
        x = torch.randn(4, 8)
        in_forward = executed(model, lambda: model(x))["aten.addmm"]
        loss = model(x).sum()
        again = executed(model, loss.backward).get("aten.addmm", 0)
        assert (in_forward, again) == (4, forwards - 2)
        model.zero_grad()
        assert_equal(gradients(model), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit"])
def test_attention_runs_once(name):
    """Dropout inside attention takes it apart into products on this device; it draws random numbers then."""
    case = CASES[name]
    wanted = plain(case, "fp32")
    model = case.make()
    with attach(model, case.choices(model, parse_choice("keep_attention"))):
        assert_equal(train(model, case, "fp32"), wanted)
    model.eval()
    counts = {}
    for kind in ("recompute", "keep_attention"):
        with attach(model, case.choices(model, parse_choice(kind))):
            loss = case.step(model, case.batch(), **({"use_cache": False} if case.takes_cache else {}))
            counts[kind] = executed(model, loss.backward)
    fused = [n for n in counts["recompute"] if "attention" in n]
    assert all(n not in counts["keep_attention"] for n in fused)
    assert counts["keep_attention"].get("aten.addmm") == counts["recompute"].get("aten.addmm")


def changed_outside_of_what_is_kept(unit: Unit, x: Tensor) -> Tensor:
    hidden = unit.up(x.expand(3, 4, 8))  # without a bias a matmul, whose last view leaves the module
    hidden.mul_(0.5)
    return x + unit.down(F.gelu(hidden)).sum(0)


@pytest.mark.parametrize("keep", ["**", "up", "down"])
@pytest.mark.parametrize("bias", [True, False])
def test_an_output_that_is_changed_in_place_is_made_again(keep: str, bias: bool):
    def make() -> nn.Module:
        model = Model(changed_outside_of_what_is_kept)
        for unit in model.units if not bias else ():
            unit.up.bias = None
        return model

    wanted = gradients(make())
    model = make()
    with attach(model, dict.fromkeys(("units.0", "units.1"), selective(keep))):
        assert_equal(gradients(model), wanted)


class Parts(nn.Module):
    """A unit of two parts: an MLP and a norm, each a module."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp, self.inner = nn.LayerNorm(8), Unit(lambda u, x: u.down(F.gelu(u.up(x)))), nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def parts() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Parts(), Parts())


@pytest.mark.slow
def test_only_parts_of_a_unit_run_again():
    wanted = gradients(parts())
    model = parts()
    x = torch.randn(512, 8)
    saved = {}
    bytes_alive_after(lambda: model(x))
    for choice, products in (
        ("save", 0),
        (selective("mlp.up", within=("mlp",)), 0),  # up is kept, down is never needed again
        (selective(within=("mlp",)), 2),
        (selective("**", within=("mlp", "norm")), 0),
        (selective("**"), 0),
        ("recompute", 2),
    ):
        with attach(model, dict.fromkeys(("0", "1"), parse_choice(choice))):
            saved[str(choice)] = bytes_alive_after(lambda: model(x))
            loss = model(x).sum()
            assert executed(model, loss.backward).get("aten.addmm", 0) == products
            model.zero_grad()
            assert_equal(gradients(model), wanted)
    activations = 2 * 512 * 32 * 4  # of the two units
    assert saved["save"] - saved[str(selective("mlp.up", within=("mlp",)))] == pytest.approx(activations, rel=0.1)
    assert saved["recompute"] < saved[str(selective(within=("mlp",)))] < saved["save"] - 1.8 * activations


PARTS = {
    "bert": ("attention", "intermediate", "output"),
    "gpt2": ("ln_1", "attn", "ln_2", "mlp"),
    "llama": ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"),
    "t5": ("layer.0.SelfAttention", "layer.0.layer_norm"),
    "vit": ("layernorm_before", "attention", "layernorm_after", "mlp"),
    "cnn": ("first", "second", "drop"),
}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("name", sorted(PARTS))
def test_parts_of_real_layers_run_again_with_equal_gradients(name: str, precision: str):
    """Each by itself, with dropout."""
    case = CASES[name]
    wanted = plain(case, precision)
    model = case.make()
    choices = [parse_choice({"kind": "selective", "within": list(PARTS[name]), "keep": keep}) for keep in ("**", [])]
    with attach(model, {unit: choices[i % 2] for i, unit in enumerate(case.units(model))}):
        assert_equal(train(model, case, precision), wanted)


@pytest.mark.parametrize("kind", ["selective", "remake"])
@pytest.mark.parametrize(
    ("keep", "within", "named"),
    [(["upp"], [], "upp"), ([], ["mlpp"], "mlpp"), ([], ["inner"], "inner"), (["mlp.up"], ["norm"], "mlp.up")],
)
def test_parts_that_there_are_not(keep, within, named, kind):
    model = parts()
    if kind == "remake" and named == "mlp.up":
        return  # what is not made again is kept anyway
    with raises(PlanError, named) as caught:
        attach(model, {"0": parse_choice({"kind": kind, "keep": keep, "within": within})})
    assert "mlp.up, mlp.down" in str(caught.value.remedy) or named == "mlp.up"
    assert all("forward" not in module.__dict__ for module in model.modules())


@torch.library.custom_op("autockpt_odd::flash_attn_with_dropout", mutates_args=())
def _dropped_out(x: Tensor, dropout_p: float) -> Tensor:
    return x * (torch.rand_like(x) >= dropout_p)


_dropped_out.register_autograd(
    lambda ctx, grad: (grad * (ctx.saved_tensors[0] != 0), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@pytest.mark.parametrize("kind", ["keep_attention", "selective", "remake"])
def test_dropout_in_fused_attention_keeps_numbers_in_step(kind: str) -> None:
    """As CUDA's have it; on the CPU an attention with dropout is taken apart."""

    def body(unit: Unit, x: Tensor) -> Tensor:
        return x + unit.down(F.dropout(_dropped_out(unit.up(x), 0.3), 0.4))

    wanted, model = gradients(Model(body)), Model(body)
    with attach(model, dict.fromkeys(("units.0", "units.1"), parse_choice(kind))):
        assert_equal(gradients(model), wanted)
