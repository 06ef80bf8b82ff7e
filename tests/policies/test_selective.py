"""What keeping some outputs of a unit that runs again can get wrong."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autockpt.checkpointing.replay_context import recomputing
from autockpt.errors import ConflictError, PlanError
from autockpt.runtime import attach
from autockpt.schema.choices import Choice, parse_choice
from tests.errors import raises
from tests.policies.zoo import (
    CASES,
    Ops,
    Tally,
    assert_as_plain,
    assert_equal,
    bytes_alive_after,
    number,
    on,
    plain,
    precision,
    train,
    trained,
)

Body = Callable[["Unit", Tensor], Tensor]


def selective(*keep: str, within: tuple[str, ...] = ()) -> Choice:
    return parse_choice({"kind": "selective", "keep": list(keep), "within": list(within)})


class Unit(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.down, self.body = nn.Linear(8, 32), nn.Linear(32, 8), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def two(body: Body) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Unit(body), Unit(body))


def four_rows() -> Tensor:
    return torch.randn(4, 8)


def mlp(unit: Unit, x: Tensor) -> Tensor:
    return x + unit.down(F.gelu(unit.up(x)))


def executed(run: Callable[[], Any]) -> Ops:
    with Ops() as ops:
        run()
    return ops


@pytest.mark.parametrize(("keep", "again"), [("up", 0), ("down", 2), ("**", 0)])
def test_what_is_kept_is_not_executed_again(keep: str, again: int):
    """Two units of two products: ``down`` is never needed again, so nothing is held where it is kept."""
    assert_as_plain(partial(two, mlp), on("01", selective(keep)), four_rows)
    model, held = two(mlp), dict[str, int]()
    for choice in (selective(keep), parse_choice("recompute")):
        with attach(model, on("01", choice)):
            loss = model(four_rows()).sum()
            held[choice.kind] = bytes_alive_after(lambda: model(four_rows()))
            counts = executed(loss.backward)
        assert number(counts.backward, "addmm") == (again if choice.kind == "selective" else 2)
    assert (held["selective"] == held["recompute"]) == (keep == "down")


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
            counts[kind] = executed(loss.backward)
    assert number(counts["keep_attention"].backward, "attention") == 0
    assert number(counts["recompute"].backward, "attention") > 0
    assert number(counts["keep_attention"].backward, "addmm") == number(counts["recompute"].backward, "addmm")


@pytest.mark.parametrize("choice", ["keep_attention", "selective"])
def test_attention_inside_of_pytorchs_own_layers_runs_once(choice: str):
    """Theirs is called by a function that asks for a mode itself, before it calls others."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2))
        return nn.Sequential(*layers)

    batch = partial(torch.randn, 2, 4, 8)
    assert_as_plain(make, on("01", parse_choice(choice)), batch)
    model, counts = make(), {}
    for kind in ("recompute", choice):
        with attach(model, on("01", parse_choice(kind))):
            counts[kind] = executed(model(batch()).sum().backward)
    assert number(counts["recompute"].backward, "attention") > number(counts[choice].backward, "attention")


RUNS = Tally()  # of kept modules


class Counted:
    """Of a module that is kept."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.calls += 1
        return super().forward(x)  # type: ignore[misc]


class Linear(Counted, nn.Linear):
    pass


class Convolution(Counted, nn.Conv1d):
    pass


class Noisy(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class Greedy(Linear):
    """Saves more of its own than it returns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin().exp()


class Changing(Linear):
    """Changes what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.relu_(x))


class Rounding(Linear):
    """Saves what looks like a cast of its input, and is none."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.calls += 1
        return F.linear((x * 8).round().double(), self.weight.double()).float()


class Same(Linear):
    def forward(self, x: Tensor) -> Tensor:
        RUNS.calls += 1
        return x


def after(unit: Any, x: Tensor) -> Tensor:
    return unit.down(F.gelu(unit.up(x)))


def after_another(unit: Any, x: Tensor) -> Tensor:
    return unit.down(F.gelu(unit.up(x.detach().sin())))


def transposed(unit: Any, x: Tensor) -> Tensor:
    return unit.down(F.gelu(unit.up(x)).mT)


def in_place(unit: Any, x: Tensor) -> Tensor:
    return unit.down(F.gelu(unit.up(x).mul_(2.0)))


def by_data(unit: Any, x: Tensor) -> Tensor:
    hidden = unit.up(x)
    hidden.data.mul_(2.0)
    return unit.down(F.gelu(hidden))


def view_in_place(unit: Any, x: Tensor) -> Tensor:
    hidden = unit.up(x.expand(3, 4, 8))  # without a bias a matmul, whose last view leaves the module
    hidden.mul_(0.5)
    return x + unit.down(F.gelu(hidden)).sum(0)


def inside_a_gradient(unit: Any, x: Tensor) -> Tensor:
    hidden = unit.up(x * 1)
    (slope,) = torch.autograd.grad(hidden.square().sum(), x, retain_graph=True)
    return unit.down(F.gelu(hidden) * slope.detach())


LINEAR, UNBIASED = lambda: Linear(8, 8), lambda: Linear(8, 8, bias=False)
FROZEN = lambda: Convolution(8, 8, 3, padding=1).requires_grad_(False)  # noqa: E731
EACH = [
    ("linear", LINEAR, after, (4, 8), 1),
    ("unbiased", UNBIASED, after, (4, 8), 1),
    ("linear of three dimensions", LINEAR, after, (2, 3, 8), 1),
    ("convolution", lambda: Convolution(8, 8, 3, padding=1), transposed, (2, 8, 5), 1),
    ("frozen", FROZEN, transposed, (2, 8, 5), 1),
    ("changed in place", LINEAR, in_place, (4, 8), 2),
    ("changed by data", LINEAR, by_data, (4, 8), 2),
    ("a changed view", LINEAR, view_in_place, (4, 8), 2),
    ("a changed view of a matmul", UNBIASED, view_in_place, (4, 8), 2),
    ("random numbers", lambda: Noisy(8, 8), after, (4, 8), 2),
    ("greedy", lambda: Greedy(8, 8), after, (4, 8), 2),
    ("its input", lambda: Same(8, 8), after, (4, 8), 2),
    ("changes its input", lambda: Changing(8, 8), after_another, (4, 8), 2),
    ("rounds its input", lambda: Rounding(8, 8), after_another, (4, 8), 2),
    ("a gradient inside", LINEAR, inside_a_gradient, (4, 8), None),
]


@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
@pytest.mark.parametrize(("inner", "body", "size", "runs"), [row[1:] for row in EACH], ids=[row[0] for row in EACH])
def test_a_kept_module_runs_again_only_where_it_has_to(
    inner: Any, body: Any, size: Any, runs: int | None, autocast: str
):
    def make() -> nn.Module:
        unit = Unit(body)
        unit.up, unit.down = inner(), nn.Linear(8, 8)
        return nn.Sequential(nn.Identity(), unit)

    counts, found = list[int](), list[dict[str, Tensor]]()
    for plan in ({}, {"1": selective("up")}):
        RUNS.calls = 0
        found.append(trained(make, plan, lambda: torch.randn(size), 5, around=lambda: precision(autocast)))
        counts.append(RUNS.calls)
    assert_equal(found[1], found[0])
    assert runs is None or counts[1] == runs * counts[0]


def attention(unit: Any, x: Tensor, dropout: float = 0.0) -> Tensor:
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    parts = unit.up(x).view(1, 16, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return unit.down(F.scaled_dot_product_attention(*parts, attn_mask=mask, dropout_p=dropout).tanh())


def attention_in_a_gradient(unit: Any, x: Tensor) -> Tensor:
    hidden = attention(unit, x * 1)
    (slope,) = torch.autograd.grad(hidden.square().sum(), x, retain_graph=True)
    return attention(unit, x) + hidden.sin() * slope.detach()


LATE = Tally()


def attention_in_a_gradient_later(unit: Any, x: Tensor) -> Tensor:
    hidden = attention(unit, x * 1)
    LATE.calls += recomputing() is None
    if LATE.calls > 2:
        torch.autograd.grad(hidden.square().sum(), x, retain_graph=True)
    return attention(unit, hidden.mean(1).sin())


@pytest.mark.parametrize("autocast", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("body", "runs"),
    [
        (attention, 1),
        (partial(attention, dropout=0.5), 0),  # taken apart on this device
        (attention_in_a_gradient, None),
        (attention_in_a_gradient_later, None),
    ],
    ids=["attention", "dropout", "in a gradient", "in a gradient later"],
)
def test_attention_that_a_unit_calls_itself(body: Body, runs: Any, autocast: str):
    def make() -> nn.Module:
        LATE.calls = 0
        unit = Unit(body)
        unit.up, unit.down = nn.Linear(8, 48), nn.Linear(8, 8)
        return nn.Sequential(nn.Identity(), unit)

    def steps(plan: dict[str, Choice]) -> dict[str, Tensor]:
        return trained(make, plan, lambda: torch.randn(1, 16, 8), 5, around=lambda: precision(autocast))

    wanted = steps({})
    for choice in (selective("**"), parse_choice("keep_attention")):
        with Ops() as ops:
            assert_equal(steps({"1": choice}), wanted)
        assert runs is None or number(ops.forward + ops.backward, "attention") == 5 * runs


def test_another_path_in_backward_is_an_error():
    def body(unit: Any, x: Tensor) -> Tensor:
        first, second = (unit.up, unit.down) if recomputing() is None else (unit.down, unit.up)
        return F.gelu(second(F.gelu(first(x))))

    unit = Unit(body)
    unit.up, unit.down = nn.Linear(8, 8), nn.Linear(8, 8)
    with attach(nn.Sequential(unit), {"0": selective("**")}), raises(ConflictError, "0"):
        nn.Sequential(unit)(four_rows()).sum().backward()


class Cut(nn.Module):
    """What it saves depends on whether it cuts the graph, but not how much."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cuts = nn.Linear(8, 8), False

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.detach() if self.cuts else x).sin()
        return (out.sin() if self.cuts else out) + x


def test_another_path_in_later_calls_that_saves_as_many():
    def switch(model: Any, step: int) -> None:
        for unit in model:
            unit.cuts = step > 3

    torch.manual_seed(0)
    model = nn.Sequential(Cut(), Cut())
    batch = partial(torch.randn, 8, 8, requires_grad=True)
    assert_as_plain(lambda: copy.deepcopy(model), on("01", selective("linear")), batch, 6, before=switch)


class Experts(nn.Module):
    """Its first product saves more of its own than can be kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(F.linear(x.mT, self.first).sin(), self.second).sin(), self.third).sin()


def test_products_after_one_that_runs_again_are_kept():
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Sequential(Experts(), nn.LayerNorm(8)) for _ in range(2)])

    batch = partial(torch.randn, 2, 8, 8)
    assert_as_plain(make, on("01", selective("**")), batch)
    model = make()
    with attach(model, on("01", selective("**"))):
        counts = executed(model(batch()).sum().backward)
    assert number(counts.backward, "mm") == 2 + 11  # the first of each unit, and what gives gradients


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
    model, saved = parts(), dict[str, int]()
    bytes_alive_after(lambda: model(torch.randn(512, 8)))
    for choice, products in (
        ("save", 0),
        (selective("mlp.up", within=("mlp",)), 0),  # up is kept, down is never needed again
        (selective(within=("mlp",)), 2),
        (selective("**", within=("mlp", "norm")), 0),
        (selective("**"), 0),
        ("recompute", 2),
    ):
        assert_as_plain(parts, on("01", choice), four_rows, 2)
        with attach(model, on("01", choice)):
            saved[str(choice)] = bytes_alive_after(lambda: model(torch.randn(512, 8)))
            assert number(executed(model(torch.randn(512, 8)).sum().backward).backward, "addmm") == products
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

    assert_as_plain(partial(two, body), on("01", kind), four_rows, 2)
