"""Layers that run again with their MLPs and norms in tiles of tokens."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autockpt.devices.cpu import allocator_peak
from autockpt.errors import ConflictError
from autockpt.runtime import attach
from autockpt.schema.choices import Recompute, parse_choice
from tests.errors import raises
from tests.policies.zoo import CASES, assert_equal, plain, train

ROUNDING = {"fp32": 1e-5, "bf16": 2e-2}
WIDTH = 16


class MLP(nn.Module):
    """``also``: what else its forward does. Counts the rows that it is given."""

    def __init__(self, also: Any) -> None:
        super().__init__()
        self.up, self.down, self.also = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH), also
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.rows.append(x.shape[:-1].numel())
        return self.also(self.down(nn.functional.gelu(self.up(x))))


class Layer(nn.Module):
    def __init__(self, also: Any) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(also)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def tower(also: Any = nn.Identity()) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(also) for _ in range(3)))


def tiled(model: nn.Module, tiles: int = 10, **options: Any) -> Any:
    return attach(model, {f"{i}": Recompute(tiles=tiles) for i in range(3)}, **options)


def step(model: nn.Module, tokens: int = 1000) -> None:
    generator = torch.Generator().manual_seed(1)
    model(torch.randn(2, tokens // 2, WIDTH, generator=generator, requires_grad=True)).square().mean().backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """All gradients together: some are nothing but rounding by themselves."""
    assert found.keys() == wanted.keys()
    apart, length = (
        sum(float(t.double().norm() ** 2) for t in ts) ** 0.5
        for ts in ([found[name].double() - wanted[name].double() for name in wanted], wanted.values())
    )
    assert 0 < apart <= tolerance * length


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_gradients_are_equal_up_to_rounding(name: str, dtype: str) -> None:
    case, kind = CASES[name], "recompute_offload" if (name == "bert") == (dtype == "fp32") else "recompute"
    model, extra, wanted = case.make(), {"use_cache": False} if case.takes_cache else {}, plain(case, dtype)
    with attach(model, case.choices(model, parse_choice({"kind": kind, "tiles": 7})), sentinels="all"):
        assert_close(train(model, case, dtype, **extra), wanted, ROUNDING[dtype])
    model = case.make()
    with attach(model, case.choices(model, parse_choice({"kind": kind, "tiles": 1})), sentinels="all"):
        assert_equal(train(model, case, dtype, **extra), wanted)


def test_an_mlp_runs_twice_and_its_wide_tensors_never_exist_as_a_whole():
    model = tower()
    with attach(model, {f"{i}": Recompute() for i in range(3)}):
        whole = allocator_peak(lambda: step(model))
    wanted, seen = gradients(model), [layer.mlp.rows for layer in model]
    [rows.clear() for rows in seen]
    with tiled(model, sentinels="off"):
        peak = allocator_peak(lambda: step(model))
    assert_close(gradients(model), wanted, ROUNDING["fp32"])
    assert all(sum(rows) == 2 * 1000 and max(rows) == 100 for rows in seen)
    assert whole > 3 * 1000 * 64 * WIDTH * 4 and peak < 0.25 * whole


def test_copies_are_tiled_and_hooks_on_weights_run_once():
    model, ran = tower(), list[Tensor]()
    with tiled(model):
        twin = copy.deepcopy(model)
        twin[0].mlp.up.weight.register_hook(lambda gradient: ran.append(gradient))
        step(twin)
        assert max(twin[0].mlp.rows) == 100 and len(ran) == 1
        assert_equal({"": ran[0]}, {"": twin[0].mlp.up.weight.grad})


def test_frozen_weights_and_inputs_without_gradients():
    wanted, model = tower(), tower()
    for each in (wanted, model):
        each.requires_grad_(False)
        each[1].mlp.up.weight.requires_grad_()
    step(wanted)
    with tiled(model):
        step(model)
        model(torch.randn(400, WIDTH)).sum().backward()
        model.zero_grad()
        step(model)
    assert_close(gradients(model), gradients(wanted), ROUNDING["fp32"])


@pytest.mark.parametrize(
    "also",
    [lambda x: x - x.mean(-2, keepdim=True), lambda x: x.flip(0), lambda x: nn.functional.dropout(x, 0.5)],
    ids=["its neighbours", "the batch", "random numbers"],
)
def test_what_is_not_row_by_row_is_refused(also):
    model = tower(also)
    with tiled(model), raises(ConflictError, "0", "tiles"):
        step(model)


def test_dropout_runs_on_all_tokens():
    model, plainly = tower(nn.Dropout(0.5)), tower(nn.Dropout(0.5))
    with tiled(model):
        for each in (model, plainly):
            torch.manual_seed(3)
            step(each)
    assert max(model[0].mlp.rows) == 1000
    assert_close(gradients(model), gradients(plainly), ROUNDING["fp32"])  # norms run in tiles


def test_weights_and_dropout_are_those_of_the_forward():
    def of_weights(model: nn.Module) -> dict[str, Tensor]:
        weights = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
        x = torch.randn(2, 500, WIDTH, generator=torch.Generator().manual_seed(1))
        loss = torch.func.functional_call(model.eval(), weights, (x,)).square().mean()
        model.train()
        loss.backward()
        return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}

    model = tower(nn.Dropout(0.5))
    wanted = of_weights(model)
    with tiled(model):
        assert_close(of_weights(model), wanted, ROUNDING["fp32"])


def test_a_unit_without_such_parts_and_a_second_derivative_are_refused():
    with raises(ConflictError, "0"):
        attach(nn.Sequential(nn.Linear(2, 2)), {"0": Recompute(tiles=2)})
    model, x = tower(), torch.randn(300, WIDTH, requires_grad=True)
    with tiled(model), raises(ConflictError, "create_graph"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
